"""What to install where a package is missing that not everybody needs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weightsync.errors import Reason, WeightSyncError

_SERVER, _OBJECTS = "'weightsync[server]'", "'weightsync[objects]'"
_OTEL = "'weightsync[otel]'"
#: By the name that is imported; others are installed by that name.
_INSTALLS = {
    "blake3": _OBJECTS,
    "obstore": _OBJECTS,
    "opentelemetry": _OTEL,
    "grpc_health": _SERVER,
    "grpc_reflection": _SERVER,
    "prometheus_client": _SERVER,
    "pydantic": _SERVER,
    "pydantic_core": _SERVER,
    "pydantic_settings": _SERVER,
}
_OURS = frozenset({"weightsync", "weightsync_client", "weightsync_server"})


def missing_package(error: ModuleNotFoundError, what: str) -> str:
    """Return which package something needs and how to install it; "": it is one of ours.

    `what` is the subject of that sentence.
    """
    package = (error.name or "").partition(".")[0]
    if not package or package in _OURS:
        return ""
    install = _INSTALLS.get(package, package)
    needed = "it" if install == package else package
    return f"run `pip install {install}`: {what} needs {needed}"


@contextlib.contextmanager
def needing(what: str) -> Iterator[None]:
    """Refuse what is imported in the block and is not there, with what to install."""
    try:
        yield
    except ModuleNotFoundError as error:
        if sentence := missing_package(error, what):
            raise WeightSyncError(Reason.NOT_SUPPORTED, sentence) from None
        raise
