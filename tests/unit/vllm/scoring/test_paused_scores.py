"""What scoring does to vLLM's queues, over a scheduler that computes nothing; see tests/vllm."""

from __future__ import annotations

import enum
from collections import deque
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.vllm.scoring.paused_scores import CAN_SCORE, SCORE, add_utilities


class Pause(enum.IntEnum):
    UNPAUSED = 0
    PAUSED_ALL = 2


class Scheduler:
    """As much of vLLM's as is used."""

    def __init__(self, *, slots: int = 4) -> None:
        self.running: list[Any] = [SimpleNamespace(request_id=name) for name in "abc"]
        self.waiting: deque[Any] = deque([SimpleNamespace(request_id="d")])
        self.kv_holding_waiting: deque[Any] = deque()
        self.deferred_waiting: set[Any] = set()
        self.requests = {one.request_id: one for one in [*self.running, *self.waiting]}
        self.max_num_running_reqs = slots
        self.max_num_scheduled_tokens = 8192
        self.num_waiting_for_streaming_input = 1
        self.prev_step_scheduled_req_ids = {"a", "b", "c"}
        self.pause_state = Pause.PAUSED_ALL
        self.kv_cache_manager = SimpleNamespace(reset_prefix_cache=lambda: True)
        self.salts: list[str] = []

    def set_pause_state(self, state: Pause) -> None:
        self.pause_state = state

    def add_request(self, request: Any) -> None:
        self.salts.append(request.cache_salt)
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def finish_requests(self, names: list[str], status: Any) -> None:
        assert status.name == "FINISHED_ABORTED"
        for name in names:
            self.waiting.remove(self.requests.pop(name))

    def has_requests(self) -> bool:
        return True

    def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        assert reset_running_requests
        while self.running:
            self.waiting.appendleft(self.running.pop())
        return bool(self.kv_cache_manager.reset_prefix_cache())

    @property
    def queues(self) -> tuple[list[str], list[str]]:
        return [r.request_id for r in self.running], [r.request_id for r in self.waiting]


class Core:
    """An EngineCore that scores a sequence per step: each token by its own id."""

    def __init__(self, scheduler: Scheduler, *, v2: bool = False) -> None:
        self.scheduler = scheduler
        self.batch_queue: Any = None
        self.request_block_hasher = None
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
            use_v2_model_runner=v2,
        )
        self.fail = self.full = False
        self.seen: list[tuple[Any, ...]] = []
        self.aborted = 0

    def _process_aborts_queue(self) -> None:
        self.aborted += 1

    def step_fn(self) -> tuple[dict[int, Any], bool]:
        scheduler = self.scheduler
        self._process_aborts_queue()
        self.seen.append(
            (
                scheduler.pause_state,
                [one.request_id for one in scheduler.running],
                scheduler.max_num_running_reqs,
                scheduler.max_num_scheduled_tokens,
                scheduler.num_waiting_for_streaming_input,
            )
        )
        if self.fail:
            raise RuntimeError("a worker failed")
        if self.full or not scheduler.waiting:
            return {}, False
        request = scheduler.waiting.popleft()
        del scheduler.requests[request.request_id]
        logprobs = torch.tensor([[-float(one)] for one in request.prompt_token_ids[1:]])
        output = SimpleNamespace(
            request_id=request.request_id,
            new_prompt_logprobs_tensors=SimpleNamespace(logprobs=logprobs),
        )
        return {0: SimpleNamespace(outputs=[output])}, True

    def post_step(self, model_executed: bool) -> None:
        pass

    def ask(self, utility: str, *args: Any) -> Any:
        return getattr(type(self), utility)(self, *args)


add_utilities(Core)

_AS_BEFORE = (["a", "b", "c"], ["d"])


@pytest.mark.parametrize("outcome", ["scored", "failed", "full", "late"])
def test_whatever_happens_the_queues_and_limits_are_as_before(outcome: str) -> None:
    core = Core(scheduler := Scheduler())
    core.fail, core.full = outcome == "failed", outcome == "full"
    answer = core.ask(SCORE, [[1, 2, 3], [4, 5]], -1.0 if outcome == "late" else 5.0)
    if outcome == "scored":
        assert answer == {"scores": [[-2.0, -3.0], [-5.0]]}
        assert core.seen[0] == (Pause.UNPAUSED, [], 4, 512, 0)
    else:
        part = {"failed": "RuntimeError: a worker", "full": "no block", "late": "in time"}[outcome]
        assert part in answer["error"]
    assert scheduler.queues == _AS_BEFORE
    assert set(scheduler.requests) == set("abcd")
    assert scheduler.pause_state is Pause.PAUSED_ALL
    assert (scheduler.max_num_running_reqs, scheduler.max_num_scheduled_tokens) == (4, 8192)
    assert scheduler.num_waiting_for_streaming_input == 1
    # What leaves meanwhile is taken out of queues that are back.
    assert core.aborted == 0
    assert "has_requests" not in vars(scheduler)


def test_no_two_scores_have_one_salt() -> None:
    core = Core(scheduler := Scheduler())
    for _ in range(2):
        core.ask(SCORE, [[1, 2]], 5.0)
    assert len(set(scheduler.salts)) == 2
    assert all(scheduler.salts)


def test_a_runner_that_holds_what_it_does_not_run_gets_no_more_than_it_has_room_for() -> None:
    core = Core(scheduler := Scheduler(slots=6), v2=True)
    core.ask(SCORE, [[1, 2]], 5.0)
    assert core.seen[0][2] == 2
    core = Core(scheduler := Scheduler(slots=4), v2=True)
    assert core.ask(SCORE, [[1, 2]], 5.0) == {"scores": [[-2.0]]}
    # The last of those that run has made room, and begins again before those that wait.
    assert core.seen[0][2] == 1
    assert scheduler.queues == (["a", "b"], ["c", "d"])


def test_an_engine_core_that_generates_scores_nothing() -> None:
    core = Core(scheduler := Scheduler())
    scheduler.pause_state = Pause.UNPAUSED
    assert "pause it first" in core.ask(SCORE, [[1, 2]], 5.0)["error"]


def test_what_it_lacks_is_told() -> None:
    core = Core(Scheduler())
    assert core.ask(CAN_SCORE) == ""
    core.vllm_config.parallel_config.pipeline_parallel_size = 2
    assert "one pipeline stage" in core.ask(CAN_SCORE)
    del core.scheduler.running
    assert core.ask(CAN_SCORE) == "Scheduler.running"
