"""Scores sequences inside a pause, by steps of vLLM's EngineCore that nothing else takes part in.

vLLM schedules nothing new while it is paused, so that a request for prompt logprobs would wait
until the resume. Here a utility lays the scheduler's queues aside, lets the core step until the
sequences are scored, and puts the queues back: whatever was in flight has its blocks and tokens
as before.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

from weightsync import clock
from weightsync.vllm.lineage.core_keys import preempt

__all__ = ["CAN_SCORE", "SCORE", "add_utilities"]

logger = logging.getLogger(__name__)

#: Names of the utilities, as `call_utility_async` takes them.
CAN_SCORE, SCORE = "weightsync_can_score", "weightsync_score"

#: vLLM holds the logits of so many tokens of a request at once; of a vocabulary of 152,000 that is
#: 300 MB in float32.
_STEP_TOKENS = 512
#: Steps in a row that compute nothing, after which no block of the cache is free: at most two are
#: in flight.
_IDLE_STEPS = 4
#: Waiting requests, by the releases of vLLM.
_QUEUES = ("waiting", "skipped_waiting", "kv_holding_waiting", "deferred_waiting")
_LIMITS = ("max_num_active_reqs", "max_num_running_reqs")


def _can_score(core: Any) -> str:
    """Return what this vLLM lacks for it, "" if nothing."""
    scheduler = getattr(core, "scheduler", None)
    needs = {
        "EngineCore": (core, ("step_fn", "post_step", "batch_queue", "request_block_hasher")),
        "Scheduler": (
            scheduler,
            (
                *("running", "waiting", "requests", "max_num_running_reqs", "pause_state"),
                *("max_num_scheduled_tokens", "set_pause_state", "finish_requests"),
            ),
        ),
    }
    for owner, (found, names) in needs.items():
        for name in names:
            if not hasattr(found, name):
                return f"{owner}.{name}"
    parallel = core.vllm_config.parallel_config
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "one pipeline stage and one data parallel rank"
    return ""


def _score(core: Any, sequences: list[list[int]], limit_s: float) -> dict[str, Any]:
    """Score sequences of token ids, however the core was paused.

    Returns:
        `scores`: by sequence, the log probability of every token but the first. Or `error`, a
        sentence: nothing is left behind then, and what was in flight is as it was.
    """
    paused = core.scheduler.pause_state
    if paused.name == "UNPAUSED" or core.batch_queue:
        return {"error": "the engine generates; pause it first"}
    try:
        with _alone(core):
            return _Scoring(core, sequences).run(clock.monotonic() + limit_s)
    except Exception as error:
        logger.exception("weightsync: sequences were not scored")
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}


@contextlib.contextmanager
def _alone(core: Any) -> Iterator[None]:
    """Let the scheduler know no request but those that come in the block, and step."""
    scheduler = core.scheduler
    paused = type(scheduler.pause_state)
    existing = {name: getattr(scheduler, name) for name in _QUEUES if hasattr(scheduler, name)}
    slots = _free_slots(core)
    limits = {name: slots for name in _LIMITS if hasattr(scheduler, name)}
    tokens = min(scheduler.max_num_scheduled_tokens, _STEP_TOKENS)
    present = {
        "running": [],
        **{name: type(queue)() for name, queue in existing.items()},
        **limits,
        "max_num_scheduled_tokens": tokens,
        **({"num_waiting_for_streaming_input": 0} if _streams(scheduler) else {}),
    }
    before = {name: getattr(scheduler, name) for name in present}
    state = scheduler.pause_state
    # They come by the input queue as well, and are found there when the queues are back.
    core._process_aborts_queue = lambda: None  # noqa: SLF001 - vLLM reads it at each step
    try:
        for name, value in present.items():
            setattr(scheduler, name, value)
        scheduler.set_pause_state(paused.UNPAUSED)
        yield
    finally:
        scheduler.set_pause_state(state)
        for name, value in before.items():
            setattr(scheduler, name, value)
        del core._process_aborts_queue  # noqa: SLF001 - ours, from above


def _streams(scheduler: Any) -> bool:
    return hasattr(scheduler, "num_waiting_for_streaming_input")


def _free_slots(core: Any) -> int:
    """Return how many requests the model runner can hold beside those in flight, at least one.

    The newer runner keeps those that it does not run; one is preempted where it is full.
    """
    scheduler = core.scheduler
    every = int(scheduler.max_num_running_reqs)
    if not getattr(core.vllm_config, "use_v2_model_runner", False):
        return every
    streaming = scheduler.num_waiting_for_streaming_input if _streams(scheduler) else 0
    free = every - len(scheduler.running) - streaming
    if free < 1 and scheduler.running:
        preempt(scheduler, scheduler.running[-1:])
        free = 1
    return max(free, 1)


class _Scoring:
    """Sequences that are being scored.

    Args:
        core: vLLM's EngineCore, which has no other request.
        sequences: Token ids.
    """

    def __init__(self, core: Any, sequences: Sequence[Sequence[int]]) -> None:
        self._core = core
        mark = secrets.token_hex(8)
        self._order = [f"weightsync-probe-{mark}-{at}" for at in range(len(sequences))]
        self._scores: dict[str, list[float]] = {}
        for name, tokens in zip(self._order, sequences, strict=True):
            core.scheduler.add_request(_request(core, name, list(tokens), mark))

    def run(self, deadline: float) -> dict[str, Any]:
        """Step until all is scored, and until no step is in flight in any case."""
        idle, error = 0, ""
        try:
            while len(self._scores) < len(self._order) and not error:
                idle = 0 if self._step() else idle + 1
                if clock.monotonic() > deadline:
                    error = "they were not scored in time"
                elif idle >= _IDLE_STEPS:
                    error = "no block of the key-value cache is free for them"
        finally:
            self._end()
        if error:
            return {"error": error}
        return {"scores": [self._scores[name] for name in self._order]}

    def _end(self) -> None:
        from vllm.v1.request import RequestStatus

        scheduler = self._core.scheduler
        left = [name for name in self._order if name in scheduler.requests]
        scheduler.finish_requests(left, RequestStatus.FINISHED_ABORTED)
        # The workers are told that they have ended; nothing is scheduled behind that.
        self._step()
        scheduler.has_requests = lambda: False
        try:
            while self._core.batch_queue:
                self._step()
        finally:
            del scheduler.has_requests

    def _step(self) -> bool:
        """Take one step; returns whether it computed anything or ended a step in flight."""
        outputs, executed = self._core.step_fn()
        self._core.post_step(executed)
        found = [one for output in (outputs or {}).values() for one in output.outputs]
        for one in found:
            self._take(one)
        return bool(executed or found)

    def _take(self, output: Any) -> None:
        tensors = output.new_prompt_logprobs_tensors
        if tensors is not None and output.request_id in self._order:
            self._scores[output.request_id] = [float(value) for value in tensors.logprobs[:, 0]]


def _request(core: Any, name: str, tokens: list[int], mark: str) -> Any:
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.request import Request

    facts = {
        "request_id": name,
        "prompt_token_ids": tokens,
        "sampling_params": SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False
        ),
        "arrival_time": clock.wall(),
        # No other request finds a key of theirs, under any version.
        "cache_salt": f"weightsync-probe-{mark}",
    }
    # A release without a field does without it; one that a release wants has no value.
    fields = EngineCoreRequest.__struct_fields__
    wanted = fields[: len(fields) - len(EngineCoreRequest.__struct_defaults__)]
    values = {field: facts.get(field) for field in wanted} | facts
    return Request.from_engine_core_request(EngineCoreRequest(**values), core.request_block_hasher)


def add_utilities(core_class: type) -> None:
    """Let an EngineCore be asked for scores; nothing else changes. Repeating it is harmless."""
    setattr(core_class, CAN_SCORE, _can_score)
    setattr(core_class, SCORE, _score)
