"""Names under which keys are found in vLLM's caches."""

from __future__ import annotations

__all__ = ["GROUP_PREFIX"]

#: How the salt begins of a request whose group shares keys over versions, and with nobody else.
GROUP_PREFIX = "weightsync-group:"
