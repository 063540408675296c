"""What ranks tell, in replies and on their status pages, as the server reads it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.name_sets import common


@dataclass(frozen=True)
class DeviceUse:
    """What a rank has on its device, in bytes: of `room` to stage versions it has taken `used`.

    `sent` is what was sent there for one version.
    """

    room: int = 0
    used: int = 0
    sent: int = 0


#: Of a rank whose parameters lie in the host's memory.
NO_DEVICE = DeviceUse()


@dataclass(frozen=True)
class Report:
    """What a rank wrote on its page at the end of a prepare or verify.

    Attributes:
        phase: `ready`, `failed`, `needs_capture` or `needs_load`.
        refused: Whether the model cannot take these tensors, now or ever.
        names: Those at fault, at most 10, of `count`.
        bytes: Bytes that a commit would write; with `patched`, only of what changes.
        proved: Whether the live parameters hold the version; None: not compared.
        mismatched: Names of tensors that differ, at most 10.
        shards: Those that lie in its device's memory, whole and as the manifest has them.
        unlike: Names of tensors that lie there and are not as the manifest has them, at most 10.
        transform: What the version went through, `plan` or `twin`.
        reads_cache_otherwise: Whether it reads a quantised cache by other scales than what is live.
        holders: Processes that have the memory, by the rank's word; None: it names none.
    """

    rank: str
    phase: str
    error: str
    refused: bool
    names: tuple[str, ...]
    count: int
    bytes: int
    patched: bool
    proved: bool | None
    mismatched: tuple[str, ...]
    seconds: float
    device: DeviceUse = NO_DEVICE
    shards: frozenset[int] = frozenset()
    unlike: tuple[str, ...] = ()
    transform: str = "plan"
    reads_cache_otherwise: bool = False
    holders: tuple[int, ...] | None = None


class NoPlan(NamedTuple):
    """Why a rank has no load plan of its engine's checkpoint, and what would have to change."""

    cause: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}" if self.remedy else self.cause


@dataclass(frozen=True)
class RankCommit:
    """What a rank answered to a commit; `content_digest` is empty unless proved.

    It is `patched` when only what changes was written, and compared. `switch_s` is the whole time
    of a switch between two steps. It has `compared_all` when all that is live was compared with
    what the server received. `parts` are digests of what it was asked to digest, by what it is; it
    was `writing` if another process could write that still.
    """

    rank: str
    content_digest: str
    written_bytes: int
    patched: bool
    commit_s: float
    verify_s: float
    error: str
    switch_s: float = 0.0
    compared_all: bool = True
    device: DeviceUse = NO_DEVICE
    parts: Mapping[str, str] = field(default_factory=dict)
    writing: bool = False


@dataclass(frozen=True)
class RankState:
    """What a rank's live parameters were last proved to hold; `content_digest` empty: unknown.

    One that has not `answered` may hold anything. `transform` is what its versions go through.
    `written` tells whether anybody has written since vLLM loaded them; None: it does not say.
    `holders` are other processes that have its memory (None: it remembers none), one of which can
    write it at any time if it is `unguarded`: those of `unguarded_by`, each with its job, and those
    whose job the rank was not told. Somebody can write it in a block if it is `writing`; `writers`
    are those that are seen to.
    """

    rank: str
    content_digest: str
    dirty: bool
    answered: bool = True
    transform: str = "plan"
    written: bool | None = None
    holders: tuple[int, ...] | None = ()
    unguarded: bool = False
    writing: bool = False
    writers: tuple[int, ...] = ()
    unguarded_by: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class RankLoad:
    """How far a rank is with loading a version beside generation.

    Attributes:
        phase: `starting`, `capturing`, `loading`, `ready` or `failed`; `percent` is of it.
        report: What it ended with; None: it has not ended.
        cached: Whether it had it from before, when it was live, and loaded nothing.
        holds: Content digests of what lies in its live weights and beside them.
        arena_bytes: Memory that holds what was loaded.
        restarts: How often its loader had to be started again.
    """

    rank: str
    phase: str = "starting"
    percent: int = 0
    report: Report | None = None
    cached: bool = False
    holds: frozenset[str] = frozenset()
    seconds: float = 0.0
    arena_bytes: int = 0
    restarts: int = 0


def read_names(reply: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(map(str, reply.get("names", ())))


def read_common(replies: Sequence[Mapping[str, Any]], field: str) -> str:
    """Return the names that every rank names, as `name_sets` packs them; "": one names none.

    A rank knows only its own part of the model: what one does not load another one may. FAULT: the
    ranks do not speak of the same tensors.
    """
    texts = [str(reply.get(field, "")) for reply in replies]
    if not all(texts):
        return ""
    try:
        return common(texts)
    except ValueError as error:
        msg = f"the ranks disagree on {field} tensors ({error}); restart vLLM"
        raise WeightSyncError(Reason.FAULT, msg) from error


def read_no_plan(replies: Iterable[Mapping[str, Any]]) -> NoPlan | None:
    """Return why a capture has made no plan of the checkpoint; None: each rank has one."""
    for reply in replies:
        if reply.get("transform") == "twin":
            return NoPlan(str(reply.get("why")), str(reply.get("remedy", "")))
    return None


def read_report(rank: str, ticket: str, page: dict[str, Any] | None) -> Report | None:
    """Return what a rank tells at the end of the work of a ticket; None: it tells no end."""
    if page is None or page.get("ticket") != ticket or page.get("phase") == "running":
        return None
    return Report(
        rank=rank,
        phase=str(page.get("phase")),
        error=str(page.get("error", "")),
        refused=bool(page.get("refused")),
        names=read_names(page),
        count=int(page.get("names_total", 0)),
        bytes=int(page.get("bytes", 0)),
        patched=bool(page.get("patched")),
        proved=page.get("proved"),
        mismatched=tuple(page.get("mismatched", ())),
        seconds=float(page.get("seconds", 0.0)),
        device=_device(page),
        shards=frozenset(map(int, page.get("shards", ()))),
        unlike=tuple(map(str, page.get("unlike", ()))),
        transform=str(page.get("transform", "plan")),
        reads_cache_otherwise=bool(page.get("reads_cache_otherwise")),
        holders=tuple(map(int, page["holders"])) if "holders" in page else None,
    )


def read_state(rank: str, reply: Mapping[str, Any]) -> RankState:
    if not reply.get("ok"):
        return RankState(rank, "", dirty=True, answered=False)
    return RankState(
        rank,
        str(reply.get("content_digest", "")),
        bool(reply.get("dirty", True)),
        transform=str(reply.get("transform", "plan")),
        written=bool(reply["written"]) if "written" in reply else None,
        holders=tuple(map(int, reply["holders"])) if "holders" in reply else None,
        unguarded=bool(reply.get("unguarded")),
        writing=bool(reply.get("writing")),
        writers=tuple(map(int, reply.get("writers", ()))),
        unguarded_by=tuple((int(pid), str(job)) for pid, job in reply.get("unguarded_by", ())),
    )


def read_load(rank: str, ticket: str, page: dict[str, Any] | None) -> RankLoad:
    if page is None or page.get("ticket") != ticket:
        return RankLoad(rank)
    report = read_report(rank, ticket, page)
    if report is None:
        return RankLoad(rank, str(page.get("load", "starting")), int(page.get("percent", 0)))
    return RankLoad(
        rank,
        report.phase,
        100,
        report,
        bool(page.get("held_before")),
        frozenset(map(str, page.get("held", ()))),
        float(page.get("load_s", 0.0)),
        int(page.get("arena_bytes", 0)),
        int(page.get("loader_restarts", 0)),
    )


def shards_read(ticket: str, page: dict[str, Any] | None) -> int:
    """Return of how many of the first shards a rank will read nothing any more.

    Who tells no number may read everything.
    """
    if page is None or page.get("ticket") != ticket:
        return 0
    if page.get("phase") == "ready":
        return 0 if page.get("shards") else sys.maxsize
    read = page.get("read", 0)
    return read if page.get("phase") == "running" and isinstance(read, int) else 0


def _device(reply: dict[str, Any]) -> DeviceUse:
    room, used, sent = (
        int(reply.get(name, 0)) for name in ("device_room", "device_used", "h2d_bytes")
    )
    return DeviceUse(room, used, sent)


def read_commit(rank: str, apply_id: str, reply: dict[str, Any]) -> RankCommit:
    error = str(reply.get("error", ""))
    if reply.get("apply_id") != apply_id:
        # A reply to another call must never pass for an acknowledgement (vllm#49972).
        error = error or f"answered for apply {reply.get('apply_id')!r}"
    if not reply.get("ok") and not error:
        error = "refused without a reason"
    return RankCommit(
        rank=rank,
        content_digest="" if error else str(reply.get("content_digest", "")),
        written_bytes=int(reply.get("written_bytes", 0)),
        patched=bool(reply.get("patched")),
        commit_s=float(reply.get("commit_s", 0.0)),
        verify_s=float(reply.get("verify_s", 0.0)),
        error=error,
        switch_s=float(reply.get("switch_s", 0.0)),
        compared_all=bool(reply.get("compared_all", not reply.get("patched"))),
        device=_device(reply),
        parts=reply.get("parts", {}),
        writing=bool(reply.get("writing")),
    )
