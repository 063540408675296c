"""Whether the live parameters of an engine can be handed out, and how its ranks do it."""

from __future__ import annotations

import os
import secrets
from typing import TYPE_CHECKING

from weightsync.engine import ATTACH
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.attach_server import HandedOut
from weightsync_server.engine.file_offers import offered_by_each
from weightsync_server.engine.ranks import QUICK_S
from weightsync_server.engine.refusals import check_ready

if TYPE_CHECKING:
    from weightsync.shm.segment_socket import SegmentServer
    from weightsync_server.engine.outcome import PreparedVersion
    from weightsync_server.engine.session import EngineSession

__all__ = ["check_attachable", "hand_out"]


def check_attachable(session: EngineSession) -> None:
    """Refuse an engine whose ranks cannot hand out what is live.

    Raises:
        WeightSyncError: ENGINE_REFUSED, with what stands in the way.
    """
    if ATTACH not in session.info.capabilities:
        raise _refused(
            "this engine hands out no memory: its ranks are on several hosts, or the weightsync "
            "release in vLLM is an older one; install the same release on both sides"
        )
    if len({rank.partition("/")[0] for rank in session.info.ranks}) > 1:
        raise _refused(
            "this engine has data parallel ranks, of which each holds the model; start vLLM "
            "without --data-parallel-size to train in its memory"
        )
    if session.loads is not None:
        raise _refused(
            f"versions of this model are loaded beside generation ({session.loads.why}), so that "
            "no view of what is live is a tensor of the checkpoint; push versions of it in place "
            "of attaching"
        )


async def hand_out(
    session: EngineSession, live: PreparedVersion, segments: SegmentServer
) -> HandedOut:
    """Return what opens the memory of every rank; the caller closes it.

    Args:
        session: Of the engine.
        live: What it serves.
        segments: Where ranks send it.

    Raises:
        WeightSyncError: ENGINE_REFUSED with what a rank said, ENGINE_AWAY.
    """
    offer = f"attach-{secrets.token_hex(8)}"
    names = [f"{offer}/{rank}" for rank in session.info.ranks]

    async def ask() -> None:
        check_ready(await session.ranks.attach(live.apply_id, offer, QUICK_S))

    async with offered_by_each(segments, names, ask, "what opens the engine's memory") as ranks:
        copies = [[(name, size, os.dup(fd)) for name, size, fd in files] for files in ranks]
        return HandedOut(live.record.version, live.digest, copies)


def _refused(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.ENGINE_REFUSED, message)
