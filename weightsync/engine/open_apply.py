"""Open applies as `engine.proto` carries them."""

from __future__ import annotations

from weightsync.engine import OpenApply
from weightsync.engine.v1 import engine_pb2 as pb

__all__ = ["from_message", "to_message"]


def to_message(apply: OpenApply | None) -> pb.OpenApply | None:
    """Return it as a field of a message; None leaves the field unset."""
    if apply is None:
        return None
    return pb.OpenApply(
        apply_id=apply.apply_id, base_version=apply.base_version, version=apply.version
    )


def from_message(apply: pb.OpenApply) -> OpenApply | None:
    """Return what a field of a message holds; None: it is unset, or names no apply."""
    if not apply.apply_id:
        return None
    return OpenApply(apply.apply_id, apply.base_version, apply.version)
