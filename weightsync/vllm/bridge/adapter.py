"""The one Engine over vLLM's AsyncLLM, used by the bridge and the embedded engine."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any, TypeVar

from weightsync import failpoints
from weightsync.engine import (
    BETWEEN_STEPS,
    CACHE_LINEAGE,
    EngineHealth,
    EngineInfo,
    EngineState,
    Lease,
    OnExpiry,
    PauseSpec,
    SwitchOrder,
    SwitchOutcome,
    UpdateFeed,
)
from weightsync.engine.leases import PauseLease, ServeLimit
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.vllm.bridge.checkpoint import offer_files
from weightsync.vllm.bridge.engine_keys import EngineKeys
from weightsync.vllm.bridge.engine_scores import EngineScores
from weightsync.vllm.bridge.extension_points import EngineOffer, MakeUpdates
from weightsync.vllm.bridge.generation import GenerationControl
from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.bridge.llm_calls import VllmCalls, error_text
from weightsync.vllm.bridge.resume_guard import ResumeGuard
from weightsync.vllm.bridge.sleep_guard import DeviceTurns, SleepGuard
from weightsync.vllm.bridge.support import check_pause, describe
from weightsync.vllm.bridge.worker_calls import (
    COMMIT,
    SWITCH,
    TOUCH_WEIGHTS,
    WorkerCalls,
)
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.lineage.cache_key import Lineage
from weightsync.vllm.worker_protocol import METHODS, rank_names

logger = logging.getLogger(__name__)


T = TypeVar("T")


class ShieldedTasks:
    """Keeps tasks until they end; a caller that is cancelled cancels none of them."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Future[Any]] = set()

    def start(self, work: Awaitable[T]) -> asyncio.Future[T]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def begin(self, work: Awaitable[object]) -> None:
        """Begin work whose failure is logged, as nobody waits for it."""
        self.start(work).add_done_callback(_log_failure)

    async def run(self, work: Awaitable[T]) -> T:
        task = self.start(work)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            # Nobody will look at its outcome any more.
            task.add_done_callback(_log_failure)
            raise

    def cancel(self) -> None:
        for task in list(self._tasks):
            task.cancel()


def _log_failure(task: asyncio.Future[Any]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("weightsync: %s", error_text(task.exception() or Exception()))


#: How long a lease that ran out waits for an engine core that may be inside a worker call.
_ASK_S = 1.0


class VllmEngine:
    """Pauses, resumes and calls one vLLM engine, as `Engine` says, on the loop of its AsyncLLM.

    It starts UNRECONCILED and paused: weights that nobody has proved are never served. A pause is a
    lease: when it runs out, the engine resumes only if it was paused with RESUME and every rank
    tells the same proved version, and is fenced otherwise. It is fenced as well when vLLM takes
    longer than a lease to stop or to start, until that call has returned, and when the time is over
    for which its server has let it serve.

    `kind` is `bridge` or `embedded`. `updates` is what the engine receives by itself, or None.
    """

    def __init__(
        self, llm: Any, vllm_version: str, kind: str, makers: Sequence[MakeUpdates] = ()
    ) -> None:
        self._vllm = VllmCalls(llm)
        ranks = rank_names(self._vllm.config.parallel_config)
        self._workers = WorkerCalls(self._vllm, ranks, self._check_call, self._give_up)
        self._tasks = ShieldedTasks()
        self._sleep = SleepGuard(
            llm,
            self._tasks.run,
            self._workers.settle,
            self._stands,
            self._stop_behind,
            self._stop_unless_serving,
        )
        self._state = EngineState.UNRECONCILED
        self._reason = "no weightsync-server has verified the weights of this engine yet"
        self._lease = PauseLease(self._on_expiry)
        self._limit = ServeLimit(self._out_of_time)
        self._changes = asyncio.Lock()
        ResumeGuard(llm.engine_core, self.condition, self._changes.locked, self._sleep.resumed)
        settings = EngineSettings.load()
        keys = EngineKeys(llm, self._vllm.cores, settings.cache_lineage)
        self._scores = EngineScores(llm, self._vllm.cores)
        self._generation = GenerationControl(self._vllm, keys, self._end_fenced)
        self._served = ""
        #: Whether what was started last is what vLLM itself has loaded, and nobody had proved.
        self._unproved = False
        self._turns = DeviceTurns(self._device_in_use, self._workers.settle)
        offer = EngineOffer(
            llm,
            self._vllm.transfer_backend,
            lambda method, args: self._tasks.run(self._workers.call(method, args)),
            self.condition,
            self._turns,
            settings,
        )
        self.updates: UpdateFeed | None = None
        for make in makers:
            self.updates = make(offer)
        self._info = describe(
            self._vllm, vllm_version, kind, ranks, accept_caches=settings.accept_caches
        )

    @property
    def live(self) -> LiveVersions:
        return self._generation.live

    async def start(self) -> None:
        """Pause the engine before anything can ask it for tokens."""
        await self._sleep.start()
        await self._generation.first_stop()
        await self._scores.begin()
        found = self._info.capabilities | self._scores.capabilities
        if self._generation.keys.kind is Lineage.CORE:
            found |= {CACHE_LINEAGE}
        self._info = dataclasses.replace(self._info, capabilities=found)

    async def close(self) -> None:
        """Stop the timers; vLLM itself is left as it is."""
        self._drop_lease()
        self._limit.drop()
        self._generation.close()
        self._tasks.cancel()

    def condition(self) -> tuple[EngineState, str]:
        """Return the present state and its reason without asking anybody."""
        self._limit.check()
        if self._vllm.dead:
            return EngineState.DEAD, "the vLLM engine process has died; restart vLLM"
        return self._state, self._reason

    async def hello(self) -> EngineInfo:
        state, reason = self.condition()
        open_apply = self._lease.open_apply
        return dataclasses.replace(self._info, state=state, reason=reason, open_apply=open_apply)

    async def health(self, newest: int | None = None) -> EngineHealth:
        """Answers at once whatever the engine core and the workers do."""
        if newest is not None:
            self.live.newest = newest
        state, reason = self.condition()
        keys = self._generation.keys
        return EngineHealth(
            state,
            reason,
            self._info.engine_id,
            self._vllm.requests,
            self._sleep.asleep,
            open_apply=self._lease.open_apply,
            cache_key="" if keys.kind is Lineage.NONE else keys.key,
            cut_requests=keys.cut,
            moved_requests=keys.moved,
            key_move_s=keys.move_s,
        )

    async def serve_for(self, seconds: float | None) -> None:
        self._limit.move(seconds)

    async def pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        """Return when generation stands still, under a lease of `lease_s` seconds.

        A fenced or unreconciled engine stays what it is; the lease then only keeps others away.
        Raises APPLY_BUSY while another lease holds, ENGINE_FENCED if vLLM did not stop in time, and
        ENGINE_ASLEEP, REQUEST_INVALID or ENGINE_AWAY.
        """
        check_pause(spec, lease_s)
        return await self._tasks.run(self._pause(spec, lease_s))

    async def renew(self, lease_id: str, lease_s: float) -> None:
        self._lease.renew(lease_id, lease_s)

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        """Start generation on a version that every rank has proved; return whether a label was set.

        Without a digest it generates with what vLLM itself has loaded, if nothing was written
        since. Raises ENGINE_REFUSED when not all ranks have reported the digest, and ENGINE_FENCED
        if vLLM did not start in time.
        """
        return await self._tasks.run(self._resume(lease_id, version, content_digest))

    async def switch(self, order: SwitchOrder) -> SwitchOutcome:
        """Let every rank change the version between two steps, without a pause.

        Nothing was written where this raises APPLY_BUSY, ENGINE_ASLEEP or ENGINE_REFUSED (it serves
        another base). Raises ENGINE_AWAY if vLLM could not do it.
        """
        return await self._tasks.run(self._switch(order))

    async def score(
        self, sequences: Sequence[Sequence[int]], lease_id: str, limit_s: float
    ) -> list[list[float]]:
        """Return log probabilities, as `Engine` says.

        Raises ENGINE_REFUSED for a lease that is not the present one, and without one unless the
        engine generates.
        """
        self._scores.check(sequences, limit_s, paused=bool(lease_id))
        self._check_alive()
        self._sleep.check_awake()
        if lease_id:
            self._lease.check(lease_id)
            return await self._tasks.run(self._scores.paused(sequences, limit_s))
        if self._state is not EngineState.SERVING:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, "the engine does not generate, so nothing was scored"
            )
        return await self._scores.live(sequences, limit_s)

    async def fence(self, reason: str) -> None:
        await self._tasks.run(self._fence(reason))

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Run one of our worker methods on every rank, to its end although nobody may wait."""
        known = METHODS.keys() - {SWITCH}
        if method not in known:
            raise invalid_request(f"no worker method {method!r}; use {sorted(known)}")
        return await self._tasks.run(self._workers.call(method, args))

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        return await asyncio.to_thread(offer_files, self._vllm.config, segment_socket, offer_id)

    # What runs to its end whether or not the caller waits.

    async def _pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        async with self._changes:
            self._check_ready()
            self._check_free()
            self._generation.patience_s = lease_s
            self._sleep.hold()
            try:
                mode = await self._generation.stop(spec)
            except BaseException:
                self._sleep.release()
                raise
            self._workers.committed = None
            if self._state is EngineState.SERVING:
                self._state = EngineState.PAUSED
            return Lease(self._lease.take(lease_s, spec), mode)

    def _stands(self) -> bool:
        return self._state is not EngineState.SERVING

    async def _stop_behind(self) -> None:
        async with self._changes:
            if not self._stands():
                return
            # Not by `_generation`: how long vLLM takes to wake up is no matter of its patience.
            pausing = asyncio.ensure_future(self._vllm.pause("keep", clear_cache=False))
            # It is sent while nobody can start the engine; its answer comes behind the wake-up's.
            await asyncio.sleep(0)
        # Should it fail, it is asked for again when the engine is awake.
        with contextlib.suppress(Exception):
            await pausing

    async def _stop_unless_serving(self) -> None:
        # Else a resume could come before the answer to the pause, which then counts as the last.
        async with self._changes:
            if self._stands():
                await self._generation.halt()

    async def _resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        async with self._changes:
            self._check_ready()
            free = self._state in (EngineState.UNRECONCILED, EngineState.FENCED)
            # What it generates with may have got another name.
            free = free or (self._state is EngineState.SERVING and content_digest != self._served)
            if lease_id or self._lease.id or not free:
                self._lease.check(lease_id)
            # Without a lease sleep mode could come before the first step.
            self._sleep.hold()
            try:
                return await self._start(version, content_digest, free=free)
            finally:
                if not self._lease.id:
                    self._sleep.release()

    async def _start(self, version: int, content_digest: str, *, free: bool) -> bool:
        begins = self._state is EngineState.UNRECONCILED or (self._unproved and not free)
        if content_digest or not (begins and await self._workers.as_loaded()):
            await self._check_proved(content_digest, free=free)
        version = version or self._workers.versions.get(content_digest, 0)
        labelled = await self._generation.start(version, content_digest)
        self._serve(content_digest)
        if content_digest:
            self._workers.versions[content_digest] = version
        return labelled

    async def _check_proved(self, content_digest: str, *, free: bool) -> None:
        committed = self._workers.committed
        known = self._served if committed is None and not free else committed
        if not known or known != content_digest:
            known = await self._workers.proved()
        if not known or known != content_digest:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"the ranks hold {known or 'no proved version'}, not "
                f"{content_digest or 'nothing'}; commit a version on every rank first",
            )

    async def _switch(self, order: SwitchOrder) -> SwitchOutcome:
        async with self._changes:
            self._check_ready()
            self._check_free()
            self._check_switch(order)
            self._sleep.hold()
        # Without the lock: what stops vLLM must not wait for a rank that hangs.
        try:
            base = self._workers.versions.get(order.base_digest, 0)
            outcome = await self._workers.switch(order, base, self._generation)
        finally:
            if not self._lease.id:
                self._sleep.release()
        if outcome.serves == order.content_digest:
            self._workers.versions[outcome.serves] = order.version
        if self._state is EngineState.SERVING:
            self._served, self._workers.committed = outcome.serves, None
            if not outcome.serves:
                await self._fence("the ranks reported different versions after a switch")
        return outcome

    def _check_switch(self, order: SwitchOrder) -> None:
        if BETWEEN_STEPS not in self._info.capabilities:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                "pipeline stages and data parallel ranks do not take a version between the same "
                "two steps; use another pause mode",
            )
        served = self._served if self._state is EngineState.SERVING else ""
        if served != order.base_digest:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED,
                f"the engine serves {served or 'nothing'}, not {order.base_digest}; its ranks "
                "must report what they hold first",
            )

    def _device_in_use(self) -> bool:
        paused = self._changes.locked() or bool(self._lease.id)
        return paused or self._workers.switching or self._workers.touching > 0

    def _check_free(self) -> None:
        self._turns.check_free()
        if self._lease.id or self._workers.switching:
            raise WeightSyncError(
                Reason.APPLY_BUSY, "another apply has paused this engine; wait for it"
            )

    async def _fence(self, reason: str) -> None:
        await failpoints.reach("bridge.fence")
        await self._end_serving(reason or "fenced by the server")

    async def _end_serving(self, reason: str) -> None:
        # At once: a pause or resume under way may take its time, requests are refused from now on.
        self._set_fenced(reason)
        await self._stop_serving(reason)

    async def _stop_serving(self, reason: str) -> None:
        async with self._changes:
            await self._stand_fenced(reason)

    async def _stand_fenced(self, reason: str) -> None:
        self._end_fenced(reason)
        if self._generation.generating:
            # Of what was never proved no answer is worth waiting for.
            await self._generation.halt("abort" if self._unproved else "keep")

    def _set_fenced(self, reason: str) -> None:
        self._state, self._reason = EngineState.FENCED, reason
        self._generation.recompute()
        logger.error("weightsync: engine fenced: %s", reason)

    def _end_fenced(self, reason: str) -> None:
        self._drop_lease()
        self._set_fenced(reason)

    def _check_call(self, method: str) -> None:
        self._check_alive()
        if self._workers.failure:
            raise WeightSyncError(Reason.ENGINE_AWAY, self._workers.failure)
        if method in TOUCH_WEIGHTS:
            self._turns.check_free()
            self._sleep.check_awake()
        if method == COMMIT and self._generation.generating:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, "the engine generates; pause it before a commit"
            )

    async def _give_up(self, reason: str) -> None:
        self._end_fenced(reason)
        if self._generation.generating:
            with contextlib.suppress(Exception):
                await asyncio.wait_for(self._vllm.pause("keep", clear_cache=False), _ASK_S)

    # Leases.

    def _serve(self, content_digest: str) -> None:
        self._lease.settle()
        self._sleep.release()
        self._served = content_digest
        self._workers.committed = None
        self._state, self._unproved = EngineState.SERVING, not content_digest
        self._reason = "" if content_digest else "the weights that vLLM loaded are not verified yet"
        if self._limit.over:
            self._out_of_time()

    def _out_of_time(self) -> None:
        """Fence what would serve on; what waits for a decision is left to its lease."""
        resumes = self._state is EngineState.PAUSED and self._lease.on_expiry is OnExpiry.RESUME
        if resumes or self._state is EngineState.SERVING:
            # Not in the task: whoever asks for the state has it end its time, and is answered.
            self._set_fenced(self._limit.reason)
            self._tasks.begin(self._stop_serving(self._limit.reason))

    def _drop_lease(self) -> None:
        self._lease.drop()
        self._sleep.release()

    def _on_expiry(self, lease_id: str) -> None:
        self._tasks.start(self._expire(lease_id))

    async def _expire(self, lease_id: str) -> None:
        """End a lease that nobody renewed, as its pause said, or fence."""
        try:
            await failpoints.reach("bridge.expire")
            if self._lease.id == lease_id:
                logger.warning(
                    "weightsync: pause %s was not renewed in time, because its weightsync-server "
                    "is dead, suspended or out of reach; the pause ends without it",
                    lease_id,
                )
                await self._end(lease_id)
        except Exception as error:  # noqa: BLE001 - it becomes the reason of the fence
            # Nobody is there to try again, so that it must not stay paused without a reason.
            if self._lease.id == lease_id:
                text = error_text(error)
                self._end_fenced(f"the lease ran out and vLLM could not continue ({text})")

    async def _end(self, lease_id: str) -> None:
        if self._state is not EngineState.PAUSED:
            self._drop_lease()
        elif self._lease.on_expiry is OnExpiry.FENCE:
            await self._fence_unless_resumed(lease_id, self._lease.undecided())
        else:
            await self._resume_on_proved(lease_id)

    async def _fence_unless_resumed(self, lease_id: str, reason: str) -> None:
        # At once: a resume that came in time may take its own, and then it counts.
        self._set_fenced(reason)
        async with self._changes:
            if self._lease.id == lease_id:
                await self._stand_fenced(reason)

    async def _resume_on_proved(self, lease_id: str) -> None:
        begun = self._workers.commits
        question = asyncio.ensure_future(self._workers.proved())
        done, _ = await asyncio.wait({question}, timeout=_ASK_S)
        if not done and self._lease.id == lease_id:
            self._set_fenced("the lease ran out while a worker call had not returned")
        digest = await question
        async with self._changes:
            # What was written after the question is not in its answer.
            while self._workers.commits != begun:
                begun = self._workers.commits
                digest = await self._workers.proved()
            if self._lease.id != lease_id:
                return
            # Where nothing was written, a rank that tells another version is not believed.
            known = digest if self._unproved else self._served
            if not digest or (self._workers.committed is None and digest != known):
                self._end_fenced("the lease ran out and the ranks do not hold one proved version")
                return
            await self._generation.start(self._workers.versions.get(digest, 0), digest)
            self._serve(digest)

    def _check_alive(self) -> None:
        state, reason = self.condition()
        if state is EngineState.DEAD:
            raise WeightSyncError(Reason.ENGINE_AWAY, reason)

    def _check_ready(self) -> None:
        self._check_alive()
        self._generation.check_settled()
