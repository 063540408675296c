"""Who owns an engine, in the words in which everybody who is refused is told."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from weightsync.engine.v1 import engine_pb2 as pb

__all__ = ["MAX_RUN_DIR_BYTES", "OWNER_PID", "owned_by"]

#: In the metadata of a refusal because another server owns the engine.
OWNER_PID = "owner_pid"
#: Longest run_dir of an owner.
MAX_RUN_DIR_BYTES = 4096
#: Characters of it in a sentence.
_SHOWN = 200


def owned_by(owner: pb.Owner) -> str:
    """Return why another server than the owner is refused, and what to do."""
    folder = "".join(c if c.isprintable() else "?" for c in owner.run_dir[:_SHOWN])
    return (
        f"stop the other weightsync-server (pid {owner.pid}, run_dir {folder or 'unknown'}), or "
        "name another engine here: this one is that server's for as long as it lives"
    )
