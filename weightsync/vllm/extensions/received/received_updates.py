"""Updates over a transfer of vLLM's own: received by every rank, made a version by the server."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

from weightsync import clock
from weightsync.backoff import backoff_s
from weightsync.engine import EngineState, WaitingUpdate
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.vllm.bridge.extension_points import EngineOffer
from weightsync.vllm.extensions.received import UPDATE

logger = logging.getLogger(__name__)


#: How soon ranks are asked how far they are, seconds; then more seldom, because each question comes
#: between two steps of generation.
_FIRST_POLL_S, _LAST_POLL_S = 0.005, 0.1
#: How long ranks get to end a step that another one has failed at, seconds.
_LAST_S = 2.0
#: How long ranks may take to get memory, seconds.
_RESERVE_S = 600.0


class UpdateSteps:
    """Has every rank do a step, in threads beside generation, and waits for all of them.

    A rank that fails, does not begin, or gets nothing for `limit_s` is ENGINE_REFUSED.
    """

    def __init__(
        self,
        call: Callable[[Mapping[str, Any]], Awaitable[list[dict[str, Any]]]],
        limit_s: float,
    ) -> None:
        self._call = call
        self._limit_s = limit_s

    async def meet(self, step: str, wrong: str, **args: Any) -> list[dict[str, Any]]:
        """Do a step with the trainer; end the connection unless every rank is equally far.

        Returns what the ranks report; what came may still be wrong, see `failed`. `wrong` says what
        a rank that fails did not do.
        """
        try:
            # A rank that cannot be asked ends it by itself, and a little later.
            await self.ask(step, limit_s=self._limit_s + _LAST_S, **args)
            reports = await self._wait(wrong)
        except BaseException:
            await asyncio.shield(self.leave())
            raise
        if any(report["raised"] for report in reports):
            await self.leave()
            _check(reports, wrong)
        return reports

    async def reserve(self) -> None:
        """Get the memory for what was checked; a rank that has none receives too, and drops it."""
        await self.ask("reserve")
        until, asked = clock.monotonic() + _RESERVE_S, itertools.count(1)
        while running := [r["rank"] for r in await self.ask("poll") if r["running"]]:
            if clock.monotonic() > until:
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED,
                    f"rank {running[0]} could not reserve memory for the update within "
                    f"{_RESERVE_S:g} s",
                )
            await asyncio.sleep(backoff_s(next(asked), _FIRST_POLL_S, _LAST_POLL_S, 1.2))

    async def run(self, step: str, wrong: str, **args: Any) -> None:
        """Do a step that is no matter of a connection; as `meet` otherwise."""
        await self.ask(step, **args)
        _check(await self._wait(wrong), wrong)

    async def ask(self, step: str, **args: Any) -> list[dict[str, Any]]:
        reports = await self._call({"step": step, **args})
        for report in reports:
            if not report["ok"]:
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED, f"rank {report['rank']}: {report['error']}"
                )
        return reports

    async def leave(self) -> None:
        """End the connection to a trainer, where the engine still answers."""
        with contextlib.suppress(WeightSyncError):
            await self.ask("leave")

    async def forget(self) -> None:
        """Drop what has come; the connection goes too where a rank does not let go otherwise."""
        try:
            await self.ask("drop")
        except WeightSyncError:
            await self.leave()

    async def _wait(self, wrong: str) -> list[dict[str, Any]]:
        arrived, since = [-1], clock.monotonic()
        asked = itertools.count(1)
        while True:
            reports = await self.ask("poll")
            now = [int(report["arrived"]) for report in reports]
            if now != arrived:
                arrived, since = now, clock.monotonic()
            running = [report["rank"] for report in reports if report["running"]]
            if not running:
                return reports
            raised = [report for report in reports if report["raised"]]
            if clock.monotonic() - since > (_LAST_S if raised else self._limit_s):
                why = f"nothing arrived for {self._limit_s:g} s (WEIGHTSYNC_UPDATE_TIMEOUT)"
                rank = raised[0]["rank"] if raised else running[0]
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED,
                    f"rank {rank} {wrong}: {raised[0]['failure'] if raised else why}; call "
                    "init_weight_transfer_engine and send the update again",
                )
            await asyncio.sleep(backoff_s(next(asked), _FIRST_POLL_S, _LAST_POLL_S, 1.2))


def failed(reports: list[dict[str, Any]], wrong: str) -> WeightSyncError | None:
    for report in reports:
        if report["failure"]:
            return WeightSyncError(
                Reason.ENGINE_REFUSED, f"rank {report['rank']} {wrong}: {report['failure']}"
            )
    return None


def _check(reports: list[dict[str, Any]], wrong: str) -> None:
    failure = failed(reports, wrong)
    if failure is not None:
        raise failure


#: How long a server may take to make a version live, seconds.
_OUTCOME_S = 1800.0
#: How long a trainer that begins waits for a server, seconds.
_WATCHED_S = 2.0
_MAX_LABEL_BYTES = 256


@dataclass(eq=False)
class _Update:
    """An update that a trainer has begun.

    `heard_at` is when its last verb came or was answered, by `clock.monotonic`. `failure` says why
    it can never become a version, or is "". `waiting` says whether the server may take it.
    """

    update_id: str
    heard_at: float
    failure: str = ""
    parts: int = 0
    waiting: bool = False
    outcome: asyncio.Future[None] | None = None


class ReceivedUpdates:
    """One update at a time, whole or not at all; the model is written by an apply alone.

    No rank is ever waited for without end: one that gets nothing for `limit_s` ends the connection
    on all of them. Steps of generation go on meanwhile. Everything runs on one loop. With
    `partial`, tensors that an update leaves out stay what they are in what is served.
    """

    def __init__(self, offer: EngineOffer) -> None:
        self._limit_s = offer.settings.update_timeout_s
        self._steps = UpdateSteps(lambda args: offer.call(UPDATE, args), self._limit_s)
        self._turns = offer.turns
        self._backend = offer.backend
        self._partial = offer.settings.update_partial
        self._condition = offer.condition
        self._lock = asyncio.Lock()
        self._update: _Update | None = None
        self._stray = False
        self._dropping: asyncio.Task[None] | None = None
        self._watcher: asyncio.Queue[WaitingUpdate | None] | None = None
        self._watched = asyncio.Event()

    # What trainers call.

    async def open(self, info: Mapping[str, Any]) -> None:
        """Return when every rank is connected with the trainer."""
        async with self._exclusive():
            self._check_no_other()
            self._update = None
            async with self._turns.trainer(self._limit_s):
                await self._steps.meet("open", "did not meet the trainer", info=dict(info))

    async def leave(self) -> None:
        async with self._exclusive():
            self._update = None
            await self._steps.ask("leave")

    async def start(self) -> None:
        """Begin an update; an earlier one that failed, or was never finished, is dropped.

        Raises ENGINE_AWAY if nobody would make a version of it, APPLY_BUSY if another one is under
        way.
        """
        async with self._exclusive():
            self._check_no_other()
            with contextlib.suppress(TimeoutError):
                # A server that has just come watches a moment later.
                async with asyncio.timeout(_WATCHED_S):
                    await self._watched.wait()
            self._check_server()
            self._update = None
            if not all(report["open"] for report in await self._steps.ask("drop")):
                # Said before the trainer sends, who would wait for ranks that never come.
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED,
                    "there is no connection to a trainer; call init_weight_transfer_engine first",
                )
            self._update = _Update(f"update-{secrets.token_hex(8)}", clock.monotonic())
            self._expect_verb(self._update, self._limit_s)

    async def receive(self, info: Mapping[str, Any]) -> None:
        """Return when every rank has received the tensors that `info` announces.

        A refusal ends the connection and voids the update: the trainer has begun to send already,
        and that would be taken for what the next call announces.
        """
        if self._lock.locked():
            # The verb under way ends what it does; the connection ends then.
            self._stray = True
            raise _with_remedy(_busy())
        async with self._exclusive():
            try:
                update = self._begun()
                # Before any rank waits for the trainer.
                await self._steps.ask("check", info=dict(info))
                await self._steps.reserve()
                async with self._turns.trainer(self._limit_s):
                    reports = await self._steps.meet("receive", "did not receive the update")
            except BaseException as error:
                await asyncio.shield(self._part(str(error) or "it was interrupted"))
                if isinstance(error, WeightSyncError):
                    raise _with_remedy(error) from error
                raise
            if failure := failed(reports, "did not receive the update"):
                # All of it came, so that the connection is as it was.
                update.failure = failure.message
                await self._steps.forget()
                raise failure
            update.parts += 1
            update.heard_at = clock.monotonic()

    async def finish(self, label: str) -> None:
        """Return when the engine serves, as a version, all that came since `start`.

        `label` is the trainer's name for it, or "". ENGINE_REFUSED says why the engine goes on with
        what it serves.
        """
        async with self._exclusive():
            update, watcher = self._begun(), self._check_server()
            if not update.parts:
                raise invalid_request("no tensor has arrived; call update_weights before this")
            if len(label.encode()) > _MAX_LABEL_BYTES:
                raise invalid_request(f"weight_version is over {_MAX_LABEL_BYTES} bytes")
            update.outcome = asyncio.get_running_loop().create_future()
            update.waiting = True
            watcher.put_nowait(WaitingUpdate(update.update_id, self._backend, label, self._partial))
            try:
                async with asyncio.timeout(_OUTCOME_S):
                    await asyncio.shield(update.outcome)
            except TimeoutError:
                raise WeightSyncError(
                    Reason.ENGINE_REFUSED,
                    f"weightsync-server reported no outcome for {_OUTCOME_S:g} s; check its log",
                ) from None
            finally:
                self._update = None
                await self._steps.forget()

    # What the server calls.

    async def watch(self) -> AsyncGenerator[WaitingUpdate, None]:
        """Yield each update that waits, until another watcher comes."""
        watcher: asyncio.Queue[WaitingUpdate | None] = asyncio.Queue()
        before, self._watcher = self._watcher, watcher
        self._watched.set()
        if before is not None:
            self._lose()
            before.put_nowait(None)
        try:
            while (update := await watcher.get()) is not None:
                yield update
        finally:
            if self._watcher is watcher:
                self._watcher = None
                self._watched.clear()
                self._lose()

    async def offer(self, update_id: str, segment_socket: str, offer_id: str) -> list[str]:
        """Send read-only descriptors of what came, once, over the segment socket; return names."""
        update = self._waiting(update_id)
        update.waiting = False
        reports = await self._steps.ask("poll")
        files = [str(name) for report in reports for name in report["files"]]
        try:
            await self._steps.run(
                "offer", "did not hand the update over", socket=segment_socket, offer=offer_id
            )
        except WeightSyncError as error:
            update.failure = error.message
            raise
        return files

    async def end(self, update_id: str, version: int, error: str) -> None:
        """Answer the trainer that waits for an update; without effect when it does not any more."""
        update = self._update
        if update is None or update.update_id != update_id:
            return
        if error or not version:
            self._settle(error or "the server made no version of it")
        elif update.outcome is not None and not update.outcome.done():
            update.outcome.set_result(None)

    # Who may do what now.

    @contextlib.asynccontextmanager
    async def _exclusive(self) -> AsyncIterator[None]:
        if self._lock.locked():
            raise _busy()
        async with self._lock:
            try:
                yield
            finally:
                if self._stray:
                    self._stray = False
                    await self._part("update_weights was called again before it was answered")

    async def _part(self, why: str) -> None:
        """End the connection, on which more may have been sent than was received."""
        if self._update is not None:
            self._update.failure = self._update.failure or why
        await self._steps.leave()

    def _check_no_other(self) -> None:
        update = self._update
        if update is None or update.failure:
            return
        left_s = update.heard_at + self._limit_s - clock.monotonic()
        if left_s > 0:
            raise WeightSyncError(
                Reason.APPLY_BUSY,
                "another update was begun and is not finished; finish it, call "
                "shutdown_weight_transfer_engine to drop it, or wait: it is dropped if no verb "
                f"is called for {self._limit_s:g} s (WEIGHTSYNC_UPDATE_TIMEOUT)",
                retry_after_s=left_s,
            )

    def _expect_verb(self, update: _Update, seconds: float) -> None:
        asyncio.get_running_loop().call_later(seconds, self._look_after, update)

    def _look_after(self, update: _Update) -> None:
        if self._update is not update or update.failure:
            return
        left_s = update.heard_at + self._limit_s - clock.monotonic()
        if self._lock.locked() or left_s > 0:
            self._expect_verb(update, left_s if left_s > 0 else self._limit_s)
        else:
            # Kept, for the loop itself keeps no task.
            self._dropping = asyncio.ensure_future(self._drop_idle(update))

    async def _drop_idle(self, update: _Update) -> None:
        if self._lock.locked():
            self._expect_verb(update, self._limit_s)
            return
        async with self._exclusive():
            update.failure = f"no verb was called for {self._limit_s:g} s"
            logger.warning("weightsync: %s is dropped: %s", update.update_id, update.failure)
            await self._steps.forget()

    def _check_server(self) -> asyncio.Queue[WaitingUpdate | None]:
        state, reason = self._condition()
        if self._watcher is None:
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                "start weightsync-server with --engine for this vLLM: none is connected to make "
                f"a version of the update ({reason or 'none is connected'})",
                retry_after_s=1.0,
            )
        if state not in (EngineState.SERVING, EngineState.PAUSED):
            raise WeightSyncError(
                Reason.ENGINE_AWAY,
                f"this vLLM is {state} ({reason}); wait until it serves",
                retry_after_s=1.0,
            )
        return self._watcher

    def _begun(self) -> _Update:
        if self._update is None:
            raise invalid_request("no update was begun; call start_weight_update first")
        if self._update.failure:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"this update has failed ({self._update.failure}); begin another one",
            )
        self._update.heard_at = clock.monotonic()
        return self._update

    def _waiting(self, update_id: str) -> _Update:
        update = self._update
        if update is None or update.update_id != update_id or not update.waiting:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"update {update_id[:40]!r} is not waiting for a server; take the next one",
            )
        return update

    def _lose(self) -> None:
        self._settle(
            "the weightsync-server disconnected before it reported the outcome; the engine "
            "serves one whole version, the old or the new: ask the server which, or send the "
            "update again"
        )

    def _settle(self, failure: str) -> None:
        update = self._update
        if update is not None and update.outcome is not None and not update.outcome.done():
            update.failure = failure
            update.waiting = False
            update.outcome.set_exception(WeightSyncError(Reason.ENGINE_REFUSED, failure))


def _busy() -> WeightSyncError:
    return WeightSyncError(
        Reason.APPLY_BUSY,
        "another verb of a weight transfer is running; wait for its answer",
        retry_after_s=1.0,
    )


def _with_remedy(error: WeightSyncError) -> WeightSyncError:
    """Return a refusal with what the trainer is to do about the connection, which has ended."""
    if "init_weight_transfer_engine" in error.message:
        return error
    return WeightSyncError(
        error.reason,
        f"{error.message}; the connection was ended, because more may have been sent: call "
        "init_weight_transfer_engine and send the update again",
        retry_after_s=error.retry_after_s,
    )


def receive_updates(offer: EngineOffer) -> ReceivedUpdates:
    """Return what an engine receives; the verbs of vLLM's transfers find it at the AsyncLLM."""
    updates = ReceivedUpdates(offer)
    offer.llm.weightsync_updates = updates
    return updates
