"""A key runs once and is answered again, also by a server that was started after the call was done.

While this server lives a repeated call joins the task of the first, which no RPC owns; what a call
changed and was answered lies in the journal.
"""

from __future__ import annotations

import asyncio
import base64
import functools
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import xxhash
from google.protobuf.message import Message

from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.engine import replies
from weightsync_server.engine.journal import Answer, Entry, JournalFile
from weightsync_server.engine.outcome import ApplyCause, PreparedVersion

Request = pb.ApplyVersionRequest | pb.RollbackRequest
Reply = TypeVar("Reply", pb.ApplyVersionResponse, pb.RollbackResponse)
_T = TypeVar("_T")

#: Calls whose tasks are kept for those that repeat them.
_REMEMBERED = 256
#: Calls that may wait for the engine.
_MAX_WAITING = 32
_MAX_KEY_BYTES = 128
#: Bounds of what the journal keeps of one answer, bytes.
_MAX_REPLY, _MAX_MESSAGE = 16 << 10, 4 << 10


class Calls:
    """Runs calls to their end, whatever becomes of their callers; repeated ones join the first."""

    def __init__(self) -> None:
        # By idempotency key: what was asked, and who answers.
        self._tasks: OrderedDict[str, tuple[Message, asyncio.Task[Any]]] = OrderedDict()
        self._running: set[asyncio.Task[Any]] = set()

    async def run(
        self, key: str, request: Message, start: Callable[[], Coroutine[None, None, _T]]
    ) -> _T:
        """Return the answer of the call with this key, which is started if there is none yet.

        An empty `key`: the call has none. REQUEST_INVALID: the key is too long, or came with
        another request. APPLY_BUSY: too many calls wait.
        """
        task = self._known(key, request)
        if task is None:
            task = self._start(key, request, start)
        # Shielded: the caller may go away, the apply goes on.
        answer: _T = await asyncio.shield(task)
        return answer

    async def drain(self) -> None:
        while self._running:
            await asyncio.wait(self._running)

    def _start(
        self, key: str, request: Message, start: Callable[[], Coroutine[None, None, _T]]
    ) -> asyncio.Task[_T]:
        if len(self._running) >= _MAX_WAITING:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                f"{_MAX_WAITING} calls are already waiting for the engine; try again when "
                "they are answered",
                retry_after_s=1.0,
            )
        task = asyncio.create_task(start())
        self._running.add(task)
        task.add_done_callback(functools.partial(self._ended, key))
        if key:
            self._tasks[key] = (request, task)
            while len(self._tasks) > _REMEMBERED:
                self._tasks.popitem(last=False)
        return task

    def _known(self, key: str, request: Message) -> asyncio.Task[Any] | None:
        if len(key.encode()) > _MAX_KEY_BYTES:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"idempotency_key is over {_MAX_KEY_BYTES} bytes"
            )
        first, task = self._tasks.get(key, (None, None))
        if first is not None and first != request:
            raise key_reused()
        return task

    def _ended(self, key: str, task: asyncio.Task[Any]) -> None:
        self._running.discard(task)
        error = None if task.cancelled() else task.exception()
        # A refusal changed nothing: the same call may do better later.
        keep = error is None or getattr(error, "reason", None) is Reason.APPLY_RESTORED
        if key in self._tasks and self._tasks[key][1] is task and not keep:
            del self._tasks[key]


def cause(request: Request, *, rejects: int = 0, reason: str = "") -> ApplyCause:
    key = request.idempotency_key
    return ApplyCause(key, _digest(request) if key else "", rejects, reason)


def earlier_reply(journal: JournalFile, request: Request, kind: type[Reply]) -> Reply | None:
    """Return what an earlier call with this key was answered; None: none had an effect.

    Raises its refusal if it had one, and REQUEST_INVALID if it asked for something else.
    """
    entry = journal.answered(request.idempotency_key) if request.idempotency_key else None
    if entry is None or entry.answer is None:
        return None
    if entry.cause.request != _digest(request):
        raise key_reused()
    if not entry.answer.reply:
        facts = {"apply_id": entry.apply_id}
        if entry.answer.gate:
            facts["gate"] = entry.answer.gate
        raise WeightSyncError(Reason.APPLY_RESTORED, entry.answer.refusal, metadata=facts)
    return kind.FromString(base64.b64decode(entry.answer.reply))


def key_reused() -> WeightSyncError:
    return WeightSyncError(
        Reason.REQUEST_INVALID,
        "idempotency_key belongs to another request; use a key once, or repeat its request",
    )


def pack(reply: Reply) -> Answer:
    """Return a reply as the journal keeps it; one that is too large goes without its ranks."""
    kept = type(reply)()
    kept.CopyFrom(reply)
    if kept.ByteSize() > _MAX_REPLY:
        del kept.report.ranks[:]
        for engine in kept.engines:
            del engine.report.ranks[:]
    return Answer(reply=base64.b64encode(kept.SerializeToString()).decode())


def pack_refusal(error: WeightSyncError) -> Answer:
    refusal = error.message.encode()[:_MAX_MESSAGE].decode(errors="ignore")
    return Answer(refusal=refusal, gate=error.metadata.get("gate", ""))


def pack_recovered(intent: Entry, current: PreparedVersion, *, rejected: bool) -> Answer:
    """Return the answer to a call that lost its server, or its engine, after its last write.

    Every rank was found to hold `current`, which is just what `intent` was about to make live.
    `rejected`: the version that a rollback left is.
    """
    report = replies.recovered(intent, current)
    left = intent.cause.rejects
    if left:
        return pack(pb.RollbackResponse(report=report, rejected_version=left * rejected))
    return pack(pb.ApplyVersionResponse(report=report))


def _digest(request: Request) -> str:
    # With its name: the fields of one request may be read as those of another.
    name = request.DESCRIPTOR.full_name.encode()
    return xxhash.xxh3_128_hexdigest(name + b"\0" + request.SerializeToString(deterministic=True))
