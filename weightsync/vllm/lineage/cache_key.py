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
        self._uses: dict[str, int] = {}
        #: The content that the present name was made for.
        self._named = ""

    def name(self, digest: str) -> str:
        """Return the name for content that is served from now on; "" is what vLLM loaded."""
        self._named = digest
        used = self._uses.get(digest, 0)
        return _PREFIX + (digest or LOADED) + (f".{used}" if used else "")

    def give_up(self) -> None:
        """Keys of other content come to lie under the present name, so never return to it."""
        self._uses[self._named] = self._uses.get(self._named, 0) + 1


def salted(key: str, salt: str | None) -> str | None:
    """Return the salt that a request's first block is hashed with.

    A request's own salt keeps it apart as before; a group's keys belong to no version.
    """
    if not salt:
        return key or None
    return salt if salt.startswith(GROUP_PREFIX) or not key else f"{key}|{salt}"
