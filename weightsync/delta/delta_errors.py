"""What a delta is refused with."""

from __future__ import annotations

from weightsync.errors import Reason, WeightSyncError

__all__ = ["Broken", "DeltaError", "corrupt", "invalid", "unfit"]


class DeltaError(WeightSyncError):
    """A delta that cannot be made or used; no byte of a base was changed."""


class Broken(Exception):  # noqa: N818 - no error yet: the caller knows the tensor's name
    """A stream contradicts its counts. Raised by kernels before they write outside."""


def invalid(text: str) -> DeltaError:
    """Return the error for bytes that are no delta of this format."""
    return DeltaError(Reason.SHARD_INVALID, f"{text}; encode the delta again as wsd1")


def corrupt(text: str) -> DeltaError:
    """Return the error for bytes that changed after they were encoded."""
    return DeltaError(Reason.DIGEST_MISMATCH, f"{text}; send the shard again")


def unfit(text: str) -> DeltaError:
    """Return the error for a delta of other tensors than those it is to be applied to."""
    return DeltaError(Reason.LAYOUT_INVALID, f"{text}; push the full version")
