"""Leases, fences and failures of the engine adapter, over a stand-in for vLLM's AsyncLLM.

The stand-in only lets the test choose when vLLM answers and what; the same paths run against a real
vLLM in tests/vllm.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.engine import CacheUse, EngineState, PauseSpec, SwitchOrder
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge import worker_calls
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.bridge.live_versions import KeptKeys

DIGEST = "ab" * 16


class Llm:
    """What `VllmCalls` uses of AsyncLLM; remembers what was asked."""

    def __init__(self, **changes: Any) -> None:
        self.engine_core = self
        self.errored = False
        self.asleep = False
        self.log: list[Any] = []
        self.busy: list[str] = []
        self.digests = [DIGEST, DIGEST]
        self.written = True
        self.gate = asyncio.Event()
        self.gate.set()
        self.drained = asyncio.Event()
        self.fail: Exception | None = None
        self.output_processor = SimpleNamespace(request_states={"a": 1})
        self.renderer = SimpleNamespace(clear_mm_cache_async=self._cleared)
        parallel = {
            "data_parallel_size": 1, "data_parallel_rank": 0, "tensor_parallel_size": 2,
            "pipeline_parallel_size": 1, "_api_process_count": 1,
        }  # fmt: skip
        parallel |= changes.pop("parallel", {})
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(**parallel),
            model_config=SimpleNamespace(
                model="m",
                served_model_name="policy",
                revision=None,
                enable_sleep_mode=True,
            ),
            lora_config=changes.pop("lora", None),
            speculative_config=changes.pop("speculative", None),
        )

    async def _cleared(self) -> None:
        self.log.append("mm")

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        self.log.append((mode, clear_cache))
        if mode == "wait":
            await self.drained.wait()
        else:
            self.drained.set()

    async def resume_generation(self) -> None:
        await self._call_utility_async("resume_scheduler", engine=b"")

    async def _call_utility_async(self, method: str, *args: Any, engine: bytes) -> Any:
        del engine
        if method == "resume_scheduler":
            self.log.append("resume")
        else:
            await self._wake_up(*args)

    async def is_sleeping(self) -> bool:
        return self.asleep

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.log.append(f"sleep {level} {mode}")
        self.asleep = True

    async def wake_up(self, tags: list[str] | None = None) -> Any:
        return await self._call_utility_async("wake_up", tags, engine=b"")

    async def _wake_up(self, tags: list[str] | None = None) -> Any:
        self.log.append("wake up")
        self.asleep = tags is not None

    async def update_weight_version(self, label: str) -> None:
        self.log.append(f"label {label}")

    async def collective_rpc(self, method: str, args: Any = ()) -> list[dict[str, Any]]:
        self.log.append(method)
        await self.gate.wait()
        if self.fail is not None:
            raise self.fail
        busy = self.busy.pop() if self.busy else ""
        return [
            {
                "ok": True,
                "rank": rank,
                "call": args[0]["call"],
                "content_digest": digest,
                "written": self.written,
                "busy": busy,
            }
            for rank, digest in zip(("0/0/0", "0/0/1"), self.digests, strict=True)
        ]


async def _serving(llm: Llm) -> VllmEngine:
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    await engine.resume("", 7, DIGEST)
    llm.log.clear()
    return engine


def _state(engine: VllmEngine) -> EngineState:
    return engine.condition()[0]


async def _until(condition: Any) -> None:
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110 - nobody tells when the state changes
            await asyncio.sleep(0.005)


async def _refused(call: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await call
    return caught.value


async def test_starts_paused_and_serves_only_what_the_ranks_proved() -> None:
    llm = Llm()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    assert llm.log == [("keep", False)]
    assert _state(engine) is EngineState.UNRECONCILED
    llm.digests = [DIGEST, ""]
    assert (await _refused(engine.resume("", 1, DIGEST))).reason is Reason.ENGINE_REFUSED
    llm.digests = [DIGEST, DIGEST]
    assert (await _refused(engine.resume("", 1, "cd" * 16))).reason is Reason.ENGINE_REFUSED
    assert engine.live.version == 0
    assert await engine.resume("", 1, DIGEST) is True
    assert _state(engine) is EngineState.SERVING
    assert engine.live.version == 1
    info = await engine.hello()
    assert info.ranks == ("0/0/0", "0/0/1")
    assert info.state is EngineState.SERVING
    assert info.refusals == ()


async def test_pause_clears_the_caches_it_was_asked_to() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(cache=CacheUse.RECOMPUTE), 10)
    assert llm.log == ["mm", ("keep", True)]
    assert lease.mode == "keep"
    llm.log.clear()
    assert await engine.resume(lease.lease_id, 8, DIGEST) is True
    # No commit in between and the same content: nobody needs to be asked.
    assert llm.log == ["label 8", "resume"]


async def test_resume_after_commit_needs_the_digest_of_every_rank() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 10)
    llm.digests = [DIGEST, ""]
    await engine.call_workers("weightsync_commit", {"apply_id": "x"})
    error = await _refused(engine.resume(lease.lease_id, 8, DIGEST))
    assert "commit a version on every rank" in error.message
    llm.digests = ["cd" * 16] * 2
    await engine.call_workers("weightsync_commit", {"apply_id": "y"})
    await engine.resume(lease.lease_id, 8, "cd" * 16)
    assert _state(engine) is EngineState.SERVING


@pytest.mark.parametrize(
    ("digests", "written"), [([DIGEST, ""], True), (["", ""], True), ([DIGEST, DIGEST], True)]
)
async def test_what_vllm_has_loaded_is_served_before_a_proof_while_nobody_has_written(
    digests: list[str], written: bool
) -> None:
    llm = Llm()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    llm.digests, llm.written = digests, written
    assert (await _refused(engine.resume("", 0, ""))).reason is Reason.ENGINE_REFUSED
    assert _state(engine) is EngineState.UNRECONCILED
    llm.digests, llm.written = ["", ""], False
    await engine.resume("", 0, "")
    assert _state(engine) is EngineState.SERVING
    assert "verified yet" in (await engine.health()).reason
    # Its proof gives it a label, under a pause.
    llm.digests = [DIGEST, DIGEST]
    lease = await engine.pause(PauseSpec(), 5)
    assert "verified yet" in engine.condition()[1], "what waits now is not answered unproved later"
    assert await engine.resume(lease.lease_id, 7, DIGEST) is True
    assert llm.log[-2:] == ["label 7", "resume"]
    assert not (await engine.health()).reason
    # From then on it holds a version, and nothing else is taken for one.
    await engine.fence("a fault")
    assert ("keep", False) in llm.log
    assert (await _refused(engine.resume("", 0, ""))).reason is Reason.ENGINE_REFUSED


async def test_what_was_refused_before_its_proof_is_not_served_again() -> None:
    llm = Llm()
    llm.digests, llm.written = ["", ""], False
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    await engine.resume("", 0, "")
    llm.log.clear()
    await engine.fence("a second load is not what is live")
    # Its requests end: nobody would ever answer them.
    assert llm.log == [("abort", False)]
    assert (await _refused(engine.resume("", 0, ""))).reason is Reason.ENGINE_REFUSED
    assert _state(engine) is EngineState.FENCED


async def test_a_lease_that_runs_out_while_it_gets_its_label_goes_on() -> None:
    llm = Llm()
    llm.digests, llm.written = ["", ""], False
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    await engine.resume("", 0, "")
    llm.digests = [DIGEST, DIGEST]
    await engine.pause(PauseSpec(), 0.02)
    await _until(lambda: _state(engine) is EngineState.SERVING)


async def test_what_has_a_number_keeps_it_when_it_is_started_without_one() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 10)
    assert await engine.resume(lease.lease_id, 0, DIGEST) is True
    assert llm.log[-2:] == ["label 7", "resume"]
    assert engine.live.version == 7


async def test_outputs_are_known_to_have_no_label_where_vllm_did_not_take_it() -> None:
    class Unlabelled(Llm):
        async def update_weight_version(self, label: str) -> None:
            if label == "8":
                raise RuntimeError(label)

    engine = await _serving(Unlabelled())
    lease = await engine.pause(PauseSpec(), 10)
    assert engine.live.current.labelled
    assert (await _refused(engine.resume(lease.lease_id, 8, DIGEST))).reason is Reason.ENGINE_AWAY
    assert (engine.live.current.version, engine.live.current.labelled) == (8, False)
    # A request for 8 or newer would wait for what may never come.
    assert engine.live.version == 7


async def test_expired_lease_resumes_with_the_label_of_what_is_held() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 0.02)
    await _until(lambda: _state(engine) is EngineState.SERVING)
    assert llm.log[-3:] == ["weightsync_state", "label 7", "resume"]


async def test_expired_lease_fences_on_a_mixture() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 0.02)
    llm.digests = [DIGEST, "cd" * 16]
    await _until(lambda: _state(engine) is EngineState.FENCED)
    assert "resume" not in llm.log
    llm.digests = [DIGEST, DIGEST]
    await engine.resume("", 7, DIGEST)
    assert _state(engine) is EngineState.SERVING


async def test_lease_that_ends_during_a_hanging_call_fences_then_asks() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 0.02)
    llm.gate.clear()
    hanging = asyncio.create_task(engine.call_workers("weightsync_commit", {"apply_id": "x"}))
    await _until(lambda: _state(engine) is EngineState.FENCED)
    assert "had not returned" in engine.condition()[1]
    assert (await engine.health()).state is EngineState.FENCED
    llm.gate.set()
    await hanging
    await _until(lambda: _state(engine) is EngineState.SERVING)


async def test_renewed_lease_holds_and_an_old_one_is_refused() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 1.5)
    for _ in range(4):
        await asyncio.sleep(0.4)
        await engine.renew(lease.lease_id, 1.5)
    assert _state(engine) is EngineState.PAUSED
    assert (await _refused(engine.pause(PauseSpec(), 1))).reason is Reason.APPLY_BUSY
    await engine.resume(lease.lease_id, 7, DIGEST)
    assert (await _refused(engine.renew(lease.lease_id, 1))).reason is Reason.ENGINE_REFUSED
    assert (await _refused(engine.resume(lease.lease_id, 7, DIGEST))).reason is (
        Reason.ENGINE_REFUSED
    )


async def test_fence_holds_over_leases() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.fence("why")
    assert engine.condition() == (EngineState.FENCED, "why")
    assert llm.log == [("keep", False)]
    lease = await engine.pause(PauseSpec(), 0.02)
    assert _state(engine) is EngineState.FENCED
    await asyncio.sleep(0.06)
    assert _state(engine) is EngineState.FENCED
    assert (await _refused(engine.renew(lease.lease_id, 1))).reason is Reason.ENGINE_REFUSED


async def test_wait_turns_into_the_other_mode() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.drained.clear()
    spec = PauseSpec(mode="wait", cache=CacheUse.KEEP, wait_timeout_s=0.02, after_wait="abort")
    lease = await engine.pause(spec, 10)
    assert lease.mode == "abort"
    assert llm.log == [("wait", False), ("abort", False)]
    await engine.resume(lease.lease_id, 7, DIGEST)
    llm.drained.set()
    assert (await engine.pause(spec, 10)).mode == "wait"


async def test_cancelled_caller_does_not_cancel_the_call() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.gate.clear()
    task = asyncio.create_task(engine.call_workers("weightsync_state", {}))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    llm.gate.set()
    await asyncio.sleep(0.01)
    assert len(await engine.call_workers("weightsync_state", {})) == 2


async def test_failure_inside_vllm_fences_for_good() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.fail = RuntimeError("cancelled")
    error = await _refused(engine.call_workers("weightsync_state", {}))
    assert error.reason is Reason.ENGINE_AWAY
    assert _state(engine) is EngineState.FENCED
    llm.fail = None
    assert "restart vLLM" in (await _refused(engine.call_workers("weightsync_state", {}))).message


async def test_dead_and_generating_engines_are_told_apart() -> None:
    llm = Llm()
    engine = await _serving(llm)
    error = await _refused(engine.call_workers("weightsync_commit", {}))
    assert "pause it before" in error.message
    llm.errored = True
    health = await engine.health()
    assert (health.state, health.requests) == (EngineState.DEAD, 1)
    assert (await _refused(engine.pause(PauseSpec(), 1))).reason is Reason.ENGINE_AWAY


async def test_sleeping_engine_refuses_a_pause_until_it_is_fully_awake() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await llm.sleep(mode="keep")
    assert (await engine.health()).sleeping is True
    assert (await _refused(engine.pause(PauseSpec(), 1))).reason is Reason.ENGINE_ASLEEP
    await llm.wake_up(tags=["weights"])
    assert (await _refused(engine.pause(PauseSpec(), 1))).reason is Reason.ENGINE_ASLEEP
    for word in ("capture", "prepare", "commit", "verify"):
        error = await _refused(engine.call_workers(f"weightsync_{word}", {}))
        assert error.reason is Reason.ENGINE_ASLEEP
    await llm.wake_up()
    assert (await engine.health()).sleeping is False
    await engine.pause(PauseSpec(), 1)
    state = "weightsync_state"
    assert llm.log == [state, "sleep 1 keep", "wake up", "wake up", "mm", ("keep", True)]


async def test_sleeping_engine_is_not_started_before_it_is_awake() -> None:
    llm = Llm()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    await llm.sleep()
    assert (await _refused(engine.resume("", 7, DIGEST))).reason is Reason.ENGINE_ASLEEP
    await llm.wake_up()
    await engine.resume("", 7, DIGEST)
    assert _state(engine) is EngineState.SERVING
    await llm.sleep()


async def test_sleep_does_not_begin_while_a_rank_holds_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_calls, "_SETTLED_S", 0.0)
    llm = Llm()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    told = llm.collective_rpc

    async def fail(method: str, args: Any = ()) -> list[dict[str, Any]]:
        first, second = await told(method, args)
        return [first, second | {"ok": False, "error": "no memory"}]

    llm.collective_rpc = fail  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"rank 0/0/1 does not release .* \(no memory\)"):
        await llm.sleep()
    assert (await engine.health()).sleeping is False
    llm.collective_rpc = told  # type: ignore[method-assign]
    await llm.sleep()
    assert (await engine.health()).sleeping is True


async def test_sleep_does_not_come_between_proof_and_start() -> None:
    llm = Llm()
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    llm.gate.clear()
    resuming = asyncio.ensure_future(engine.resume("", 7, DIGEST))
    await asyncio.sleep(0.01)
    sleeping = asyncio.ensure_future(llm.sleep())
    await asyncio.sleep(0.01)
    assert (await engine.health()).sleeping is False
    llm.gate.set()
    await asyncio.gather(resuming, sleeping)
    assert llm.log.index("resume") < llm.log.index("sleep 1 abort")


async def test_waking_an_engine_that_is_awake_does_not_take_a_pause_for_sleep() -> None:
    class Paused(Llm):
        async def is_sleeping(self) -> bool:
            return bool(self.log)  # as vLLM answers in a pause

    llm = Paused()
    engine = await _serving(llm)
    await llm.wake_up()
    assert (await engine.health()).sleeping is False


async def test_sleep_waits_for_work_in_the_background() -> None:
    llm = Llm()
    await _serving(llm)
    llm.busy = ["", "a", "a"]
    await llm.sleep()
    assert llm.log == [*["weightsync_state"] * 3, "sleep 1 abort"]


async def test_sleep_waits_for_the_end_of_a_pause() -> None:
    llm = Llm()
    engine = await _serving(llm)
    lease = await engine.pause(PauseSpec(), 10)
    going = asyncio.ensure_future(llm.sleep())
    waking = asyncio.ensure_future(llm.wake_up())
    await asyncio.sleep(0.05)
    assert not going.done()
    assert not waking.done()
    await engine.resume(lease.lease_id, 7, DIGEST)
    await asyncio.gather(going, waking)
    assert llm.log == [
        "mm",
        ("keep", True),
        "label 7",
        "resume",
        "weightsync_state",
        "sleep 1 abort",
        "wake up",
    ]


async def test_woken_engine_that_may_not_serve_is_stopped_again() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.fence("test")
    await llm.sleep()
    await llm.wake_up()
    stopped = ("keep", False)
    # Once behind the wake-up, once more when it is done.
    assert llm.log[-3:] == ["wake up", stopped, stopped]


class Core(Llm):
    """Takes what it is asked from a queue, one after the other, and steps when that is empty.

    As vLLM's EngineCore does: it is asked in the order of the calls, some loop turns after them.

    Attributes:
        steps: How many steps it took.
        woken: Set by the test when the memory is back.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.woken = asyncio.Event()
        self._queue: asyncio.Queue[Any] = asyncio.Queue()
        self._paused = False
        self._running = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while True:
            await self._handle(*await self._queue.get())
            while not self._queue.empty():
                await self._handle(*self._queue.get_nowait())
            self.steps += not self._paused and not self.asleep

    async def _handle(self, what: Any, answer: asyncio.Future[Any]) -> None:
        answer.set_result(await what())

    async def _ask(self, what: Any, *, turns: int) -> Any:
        for _ in range(turns):
            await asyncio.sleep(0)
        answer = asyncio.get_running_loop().create_future()
        self._queue.put_nowait((what, answer))
        return await answer

    async def pause_scheduler_async(self, *, mode: str, clear_cache: bool) -> None:
        async def pause() -> None:
            self.log.append((mode, clear_cache))
            self._paused = True

        await self._ask(pause, turns=0)

    async def resume_generation(self) -> None:
        async def resume() -> None:
            self.log.append("resume")
            self._paused = False

        await self._ask(resume, turns=0)

    async def is_sleeping(self) -> bool:
        async def sleeping() -> bool:
            return self._paused or self.asleep

        return bool(await self._ask(sleeping, turns=2))

    async def sleep(self, level: int = 1, mode: str = "abort") -> None:
        async def sleep() -> None:
            self._paused = self.asleep = True

        await self._ask(sleep, turns=2)

    async def wake_up(self, tags: list[str] | None = None) -> bool:
        async def wake_up() -> bool:
            self.log.append("wake up")
            if self.asleep:
                await self.woken.wait()
            self.asleep = tags is not None
            self._paused = self._paused and self.asleep
            return not self.asleep

        return bool(await self._ask(wake_up, turns=2))


async def _asleep_and_fenced() -> tuple[Core, VllmEngine]:
    llm = Core()
    engine = await _serving(llm)
    await llm.sleep()
    await engine.fence("test")
    llm.steps = 0
    llm.log.clear()
    return llm, engine


async def test_a_fenced_engine_takes_no_step_when_it_wakes_up() -> None:
    llm, engine = await _asleep_and_fenced()
    waking = asyncio.ensure_future(llm.wake_up(tags=["weights"]))
    await _until(lambda: bool(llm.log))
    llm.woken.set()
    assert await waking is False
    assert (await engine.health()).sleeping is True
    llm.woken.clear()
    waking = asyncio.ensure_future(llm.wake_up())
    await _until(lambda: llm.log.count("wake up") == 2)
    llm.woken.set()
    assert await waking is True
    assert (await engine.health()).sleeping is False
    assert await llm.wake_up() is True
    assert llm.steps == 0
    await engine.resume("", 7, DIGEST)
    assert llm.log[-1] == "resume"
    await _until(lambda: llm.steps)


async def test_a_fence_that_comes_during_a_wake_up_holds() -> None:
    llm = Core()
    engine = await _serving(llm)
    await llm.sleep()
    waking = asyncio.ensure_future(llm.wake_up())
    await _until(lambda: "wake up" in llm.log)
    llm.steps = 0
    fencing = asyncio.ensure_future(engine.fence("test"))
    await asyncio.sleep(0.01)
    llm.woken.set()
    await asyncio.gather(waking, fencing)
    assert llm.steps == 0
    assert _state(engine) is EngineState.FENCED


async def test_a_resume_waits_for_the_stop_after_a_wake_up() -> None:
    llm, engine = await _asleep_and_fenced()
    llm.woken.set()
    asked, answered, pause = asyncio.Event(), asyncio.Event(), llm.pause_scheduler_async

    async def slow(**how: Any) -> None:
        awake = not engine._sleep.asleep
        await pause(**how)
        if awake:
            asked.set()
            await answered.wait()

    llm.pause_scheduler_async = slow  # type: ignore[method-assign]
    waking = asyncio.ensure_future(llm.wake_up())
    await asked.wait()
    resuming = asyncio.ensure_future(engine.resume("", 7, DIGEST))
    await asyncio.sleep(0.01)
    answered.set()
    await asyncio.gather(waking, resuming)
    assert _state(engine) is EngineState.SERVING
    error = await _refused(engine.call_workers("weightsync_commit", {}))
    assert "pause it before" in error.message, "it generates, and that is known"


async def test_sleep_that_throws_weights_away_is_refused() -> None:
    llm = Llm()
    await _serving(llm)
    with pytest.raises(RuntimeError, match="use level 1"):
        await llm.sleep(2)
    assert llm.log == []


async def test_failed_pause_lets_generation_go_on() -> None:
    llm = Llm()
    engine = await _serving(llm)

    async def fail(**_: Any) -> None:
        raise RuntimeError("no cache")

    llm.pause_scheduler_async = fail  # type: ignore[method-assign]
    assert (await _refused(engine.pause(PauseSpec(), 1))).reason is Reason.ENGINE_AWAY
    assert llm.log == ["mm", "resume"]
    assert _state(engine) is EngineState.SERVING


async def test_failed_pause_of_an_engine_that_stands_still_starts_nothing() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.fence("why")

    async def fail(**_: Any) -> None:
        raise RuntimeError("no cache")

    llm.pause_scheduler_async = fail  # type: ignore[method-assign]
    assert (await _refused(engine.pause(PauseSpec(), 1))).reason is Reason.ENGINE_AWAY
    assert "resume" not in llm.log
    assert engine.condition() == (EngineState.FENCED, "why")


@pytest.mark.parametrize(
    ("spec", "lease_s"),
    [(PauseSpec(mode="stop"), 1), (PauseSpec(after_wait="wait"), 1), (PauseSpec(), 0)],
)
async def test_nonsense_is_refused(spec: PauseSpec, lease_s: float) -> None:
    engine = await _serving(Llm())
    assert (await _refused(engine.pause(spec, lease_s))).reason is Reason.REQUEST_INVALID
    error = await _refused(engine.call_workers("shutdown", {}))
    assert error.reason is Reason.REQUEST_INVALID


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"parallel": {"data_parallel_size": 2}}, "data parallel"),
        ({"parallel": {"prefill_context_parallel_size": 2}}, "context"),
        ({"parallel": {"_api_process_count": 2}}, "API server"),
        ({"parallel": {"enable_eplb": True}}, "EPLB"),
        ({"lora": object()}, "LoRA"),
        ({"speculative": SimpleNamespace(method="medusa", draft_parallel_config=None)}, "medusa"),
    ],
)
async def test_unsupported_engines_say_so_in_one_sentence(changes: Any, word: str) -> None:
    info = await VllmEngine(Llm(**changes), "0.32.0", "bridge").hello()
    (sentence,) = info.refusals
    assert word in sentence
    assert ";" in sentence


async def test_a_quantised_engine_is_left_to_the_proof_of_its_weights() -> None:
    assert not (await VllmEngine(Llm(quantization="fp8"), "0.32.0", "bridge").hello()).refusals


@pytest.mark.parametrize("what", ["pause", "resume"])
async def test_what_vllm_takes_too_long_for_fences_until_it_has_returned(what: str) -> None:
    llm = Llm()
    engine = await _serving(llm)
    slow = asyncio.Event()
    quick_pause, quick_resume = llm.pause_scheduler_async, llm.resume_generation

    async def pause(**how: Any) -> None:
        await slow.wait()
        await quick_pause(**how)

    async def resume() -> None:
        await slow.wait()
        await quick_resume()

    if what == "pause":
        llm.pause_scheduler_async = pause  # type: ignore[method-assign]
        error = await _refused(engine.pause(PauseSpec(cache=CacheUse.KEEP), 0.05))
    else:
        lease = await engine.pause(PauseSpec(cache=CacheUse.KEEP), 1.5)
        llm.resume_generation = resume  # type: ignore[method-assign]
        error = await _refused(engine.resume(lease.lease_id, 7, DIGEST))
    assert error.reason is Reason.ENGINE_FENCED
    state, reason = engine.condition()
    assert state is EngineState.FENCED
    assert f"did not answer a {what}" in reason
    error = await _refused(engine.resume("", 7, DIGEST))
    assert "has not paused" in error.message
    llm.log.clear()
    slow.set()
    await _until(lambda: ("keep", False) in llm.log[1:])
    await asyncio.sleep(0.01)
    assert _state(engine) is EngineState.FENCED, "nobody has proved anything since"
    llm.log.clear()
    await engine.resume("", 7, DIGEST)
    assert llm.log[-1] == "resume"
    assert _state(engine) is EngineState.SERVING


async def test_a_fence_holds_requests_off_while_a_pause_hangs() -> None:
    llm = Llm()
    engine = await _serving(llm)
    llm.drained.clear()
    spec = PauseSpec(mode="wait", wait_timeout_s=60)
    pausing = asyncio.create_task(engine.pause(spec, 10))
    await asyncio.sleep(0.01)
    fencing = asyncio.create_task(engine.fence("why"))
    await asyncio.sleep(0.01)
    assert engine.condition() == (EngineState.FENCED, "why")
    llm.drained.set()
    await asyncio.gather(pausing, fencing)
    assert engine.condition() == (EngineState.FENCED, "why")


@pytest.mark.parametrize(
    ("field", "value"), [("call", "another"), ("rank", "0/0/0"), ("dirty", True), ("ok", False)]
)
async def test_a_reply_that_is_not_this_ranks_to_this_call_proves_nothing(
    field: str, value: Any
) -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.fence("test")
    told = llm.collective_rpc

    async def lie(method: str, args: Any = ()) -> list[dict[str, Any]]:
        first, second = await told(method, args)
        return [first, second | {field: value}]

    llm.collective_rpc = lie  # type: ignore[method-assign]
    error = await _refused(engine.resume("", 7, DIGEST))
    assert error.reason is Reason.ENGINE_REFUSED
    assert _state(engine) is EngineState.FENCED


async def test_a_lease_that_runs_out_untouched_believes_no_other_version() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 0.02)
    llm.digests = ["cd" * 16] * 2
    await _until(lambda: _state(engine) is EngineState.FENCED)
    assert "resume" not in llm.log


async def test_a_commit_that_comes_while_a_lease_ends_is_asked_about() -> None:
    llm = Llm()
    engine = await _serving(llm)
    await engine.pause(PauseSpec(), 0.02)
    told = llm.collective_rpc
    commits: list[asyncio.Task[Any]] = []

    async def cross(method: str, args: Any = ()) -> list[dict[str, Any]]:
        replies = await told(method, args)
        if method == "weightsync_state" and not commits:
            # The answer is on its way back, and the ranks are written to after all.
            llm.digests = [DIGEST, ""]
            commits.append(asyncio.ensure_future(engine.call_workers("weightsync_commit", {})))
            await asyncio.sleep(0)
        return replies

    llm.collective_rpc = cross  # type: ignore[method-assign]
    await _until(lambda: _state(engine) is EngineState.FENCED)
    assert "resume" not in llm.log
    await asyncio.gather(*commits)


async def test_a_trainer_that_sends_and_an_apply_exclude_each_other() -> None:
    llm = Llm()
    engine = await _serving(llm)
    entered, ends = asyncio.Event(), asyncio.Event()

    async def send() -> None:
        async with engine._turns.trainer(10):
            entered.set()
            await ends.wait()

    sending = asyncio.create_task(send())
    await entered.wait()
    order = SwitchOrder("b", "a", 8, "cd" * 16, DIGEST, 1.0)
    wanted = [engine.pause(PauseSpec(), 10), engine.switch(order)]
    wanted += [engine.call_workers(f"weightsync_{w}", {}) for w in ("prepare", "commit", "check")]
    llm.log.clear()
    for work in wanted:
        error = await _refused(work)
        assert (error.reason, error.retry_after_s) == (Reason.APPLY_BUSY, 1.0)
    assert llm.log == []
    assert _state(engine) is EngineState.SERVING
    ends.set()
    await sending
    # And the other way round: during a call, and from its pause to its resume.
    entered.clear()
    llm.gate.clear()
    checking = asyncio.create_task(engine.call_workers("weightsync_check", {}))
    await asyncio.sleep(0.01)
    sending = asyncio.create_task(send())
    await asyncio.sleep(0.05)
    assert not engine._turns.receiving
    lease = await engine.pause(PauseSpec(), 10)
    llm.gate.set()
    await checking
    await asyncio.sleep(0.05)
    assert not engine._turns.receiving
    await engine.resume(lease.lease_id, 7, DIGEST)
    await asyncio.wait_for(entered.wait(), 10)
    await sending


def _kept(engine: VllmEngine) -> KeptKeys:
    return engine.live.current.kept


async def test_what_a_pause_does_to_caches_is_known_of_what_is_served_next() -> None:
    engine = await _serving(Llm())
    assert _kept(engine) is KeptKeys.NONE
    version = 7
    recompute, keep = CacheUse.RECOMPUTE, CacheUse.KEEP
    for cache, kept in (
        (recompute, KeptKeys.NONE), (keep, KeptKeys.ALL), (recompute, KeptKeys.NONE),
    ):  # fmt: skip
        version += 1
        lease = await engine.pause(PauseSpec(cache=cache), 10)
        await engine.call_workers("weightsync_commit", {})
        await engine.resume(lease.lease_id, version, DIGEST)
        assert (engine.live.current.version, _kept(engine)) == (version, kept)
    # A fence clears nothing.
    await engine.fence("for a test")
    await engine.resume("", version + 1, DIGEST)
    assert _kept(engine) is KeptKeys.ALL
    await engine.close()
