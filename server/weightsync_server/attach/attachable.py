"""Whether the live parameters of an engine can be handed out, and how its ranks do it.

A rank is asked for one of these:

- `offer` and `access`: to send where what is live lies and what opens its memory, as its part of an
  offer, which is named `OFFER/RANK`. `read`: what lies on the host can be read only; `write`: what
  one block is written with, and nothing else; "", of older releases: it can be written at any time.
- `holder`, `pid`, `always` and `job`: to remember a process before it is given what was handed out,
  by its pidfd, which the segment socket has under that name; whether it can always write, and of
  which job it is.
"""

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

__all__ = ["check_attachable", "hand_out", "remember"]


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
            "push versions of this model in place of attaching: they are loaded beside generation "
            f"({session.loads.no_plan.cause}), so that no view of what is live is a tensor of the "
            "checkpoint"
        )


async def hand_out(
    session: EngineSession, live: PreparedVersion, segments: SegmentServer, access: str
) -> HandedOut:
    """Return what opens the memory of every rank; the caller closes it.

    Args:
        session: Of the engine.
        live: What it serves.
        segments: Where ranks send it.
        access: How; see above.

    Raises:
        WeightSyncError: ENGINE_REFUSED with what a rank said, ENGINE_AWAY.
    """
    offer = f"attach-{secrets.token_hex(8)}"
    names = [f"{offer}/{rank}" for rank in session.info.ranks]

    async def ask() -> None:
        request = {"offer": offer, "access": access}
        check_ready(await session.ranks.attach(live.apply_id, request, QUICK_S))

    async with offered_by_each(segments, names, ask, "what opens the engine's memory") as ranks:
        copies = [[(name, size, os.dup(fd)) for name, size, fd in files] for files in ranks]
        return HandedOut(live.record.version, live.digest, copies)


async def remember(
    session: EngineSession,
    live: PreparedVersion,
    segments: SegmentServer,
    pid: int,
    pidfd: int,
    job: str,
    *,
    always: bool,
) -> None:
    """Have every rank remember a process, before it is given what they handed out.

    Args:
        session: Of the engine.
        live: What it serves.
        segments: Where ranks take the pidfd.
        pid: Of the process, for people.
        pidfd: Of it; the caller keeps it.
        job: Of which it is; "": of an older release, which names none.
        always: Whether it can write at any time.

    Raises:
        WeightSyncError: As `hand_out`.
    """
    name = f"holder-{secrets.token_hex(8)}"
    segments.publish(name, os.dup(pidfd), 0)
    try:
        # An offer of nothing, for ranks that know no better.
        request = {"offer": "", "holder": name, "pid": pid, "always": always, "job": job}
        check_ready(await session.ranks.attach(live.apply_id, request, QUICK_S))
    finally:
        segments.withdraw(name)


def _refused(message: str) -> WeightSyncError:
    return WeightSyncError(Reason.ENGINE_REFUSED, message)
