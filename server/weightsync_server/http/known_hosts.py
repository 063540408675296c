"""By which names a server may be asked where no caller proves anything: none that a site chooses.

Any site can give its own name the address of this server (DNS rebinding), and its page could then
read what a browser on this network is answered.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

#: What a Host header may be that no site can have chosen.
_ADDRESS = re.compile(r"(localhost|[0-9.]+|\[[0-9a-f:.]+\])(:[0-9]+)?", re.IGNORECASE)
_NAME = re.compile(r"\.?[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*")
_PORT = re.compile(r":[0-9]*")
#: Characters of a name that are shown: it is text from outside.
_SHOWN = 64


class KnownHosts:
    """Tells the names of this server from those that a site may have chosen.

    Known are addresses, `localhost`, the `names`, and all names below one with a leading dot.
    """

    def __init__(self, names: Sequence[str] = ()) -> None:
        self._names = frozenset(name.lower() for name in names)

    def unknown(self, hosts: Sequence[str]) -> str:
        """Return which of the Host headers of a request is unknown, as it is shown; "": none."""
        for host in hosts:
            if not _ADDRESS.fullmatch(host) and not self._has(host):
                return _PORT.sub("", host, count=1)[:_SHOWN]
        return ""

    def _has(self, host: str) -> bool:
        name = re.sub(r"\.?(:[0-9]+)?$", "", host.lower())
        above = name.split(".")
        return name in self._names or any(
            f".{'.'.join(above[at:])}" in self._names for at in range(1, len(above))
        )


def check_names(names: list[str]) -> list[str]:
    """Return host names; refuse with ValueError what can be no part of a Host header."""
    for name in names:
        if not _NAME.fullmatch(name.lower()):
            raise ValueError(
                "host_names must be names such as weightsync.example.com, or .example.com for all "
                f"names below it, without a port, not {name!r}"
            )
    return names
