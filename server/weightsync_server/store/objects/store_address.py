"""Addresses of object stores in the environment, looked at before obstore is given them.

Obstore takes any text, and with some it panics at the first request.
"""

from __future__ import annotations

import ipaddress
import os
import re

from weightsync.errors import Reason, WeightSyncError

__all__ = ["check_addresses"]

#: Those that obstore reads.
_VARIABLES = {
    "s3": ("AWS_ENDPOINT", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_ENDPOINT", "AZURE_STORAGE_ENDPOINT"),
}
_ADDRESS = re.compile(
    r"https?://"
    r"([A-Za-z0-9._~%:-]+@)?"
    r"(\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|(?P<host>[A-Za-z0-9._-]+))"
    r"(:(?P<port>[0-9]{1,5}))?"
    r"(/[A-Za-z0-9._~%/-]*)?",
    re.IGNORECASE,
)
_MAX_PORT = 65535


def check_addresses(scheme: str) -> None:
    """See that the environment holds no address of stores that is none.

    Args:
        scheme: Of the store's URL.

    Raises:
        WeightSyncError: REQUEST_INVALID, naming the variable and not what it holds, where there may
            be a password.
    """
    for name in _VARIABLES[scheme]:
        value = os.environ.get(name)
        if value is not None and not _is_address(value):
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{name} is no address of an object store; write http:// or https://, the host and "
                "its port, such as http://127.0.0.1:9000, or unset it",
            )


def _is_address(value: str) -> bool:
    match = _ADDRESS.fullmatch(value)
    if match is None or int(match["port"] or 0) > _MAX_PORT:
        return False
    host = match["ipv6"] or match["host"]
    # What ends in a number is an address of IPv4, or nothing.
    if match["ipv6"] is None and not host.rpartition(".")[2].isdecimal():
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
