"""Names under which the keys of a version are found in vLLM's caches."""

from __future__ import annotations

import enum

__all__ = ["GROUP_PREFIX", "LOADED", "KeyNames", "Lineage", "salted"]

#: How the salt begins of a request whose group shares keys over versions, and with nobody else.
GROUP_PREFIX = "weightsync-group:"
#: What vLLM itself loaded, before a version is proved.
LOADED = "loaded"

_PREFIX = "weightsync:"


class Lineage(enum.StrEnum):
    """Where keys are kept apart by version.

    CORE: in EngineCore, for every request, in flight ones included.
    ADMISSION: in the API process, when a request comes; what is computed over a switch stays under
        the name of the version before it, which is not used again.
    NONE: they are not.
    """

    CORE = "core"
    ADMISSION = "admission"
    NONE = "none"


class KeyNames:
    """Names each content, and gives a name up once other content may lie under it."""

    def __init__(self) -> None:
        #: How often the name of a content has been given up.
        self._given_up: dict[str, int] = {}

    def name(self, digest: str) -> str:
        """Return the name for content; "" is what vLLM loaded."""
        content = digest or LOADED
        times = self._given_up.get(content, 0)
        return f"{_PREFIX}{content}" + (f".{times}" if times else "")

    def give_up(self, name: str) -> None:
        """Never return this name again: keys of other content come to lie under it."""
        content, _, times = name.removeprefix(_PREFIX).partition(".")
        now = int(times) if times.isdigit() else 0
        self._given_up[content] = max(self._given_up.get(content, 0), now + 1)


def salted(key: str, salt: str | None) -> str | None:
    """Return the salt that a request's first block is hashed with.

    A request's own salt keeps it apart as before; a group's keys belong to no version.
    """
    if not salt:
        return key or None
    return salt if salt.startswith(GROUP_PREFIX) or not key else f"{key}|{salt}"
