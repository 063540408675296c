"""What an engine scores, and what it refuses, over test_adapter's stand-in for vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from tests.unit.vllm.bridge.test_adapter import DIGEST, Llm, _refused
from weightsync.engine import PAUSED_SCORES, SCORES, PauseSpec
from weightsync.errors import Reason
from weightsync.vllm.bridge.adapter import VllmEngine
from weightsync.vllm.scoring.paused_scores import CAN_SCORE, SCORE


class Scored(Llm):
    """A vLLM whose EngineCore scores."""

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.core_engines = (b"",)
        self.lacks = lacks
        self.answer: dict[str, Any] = {"scores": [[-1.5, -2.5]]}
        self.vllm_config.model_config.max_model_len = 100
        self.vllm_config.model_config.get_vocab_size = lambda: 50

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        if method == CAN_SCORE:
            return self.lacks
        if method != SCORE:
            # Keys move.
            return {}
        self.log.append((method, *args))
        return self.answer


async def _engine(llm: Llm) -> VllmEngine:
    engine = VllmEngine(llm, "0.32.0", "bridge")
    await engine.start()
    await engine.resume("", 7, DIGEST)
    return engine


async def test_in_a_pause_the_engine_core_is_asked_under_its_lease() -> None:
    llm = Scored()
    engine = await _engine(llm)
    assert {SCORES, PAUSED_SCORES} <= (await engine.hello()).capabilities
    lease = await engine.pause(PauseSpec(), 30)
    assert await engine.score([[1, 2, 3]], lease.lease_id, 5) == [[-1.5, -2.5]]
    assert llm.log[-1] == (SCORE, [[1, 2, 3]], 5)
    error = await _refused(engine.score([[1, 2, 3]], "another", 5))
    assert error.reason is Reason.ENGINE_REFUSED
    llm.answer = {"error": "they were not scored in time"}
    error = await _refused(engine.score([[1, 2, 3]], lease.lease_id, 5))
    assert (error.reason, "in time" in error.message) == (Reason.DEADLINE_EXCEEDED, True)


async def test_without_a_lease_it_must_generate() -> None:
    engine = await _engine(Scored())
    await engine.pause(PauseSpec(), 30)
    error = await _refused(engine.score([[1, 2, 3]], "", 5))
    assert (error.reason, "does not generate" in error.message) == (Reason.ENGINE_REFUSED, True)


async def test_an_engine_core_that_lacks_something_scores_in_no_pause() -> None:
    engine = await _engine(Scored("Scheduler.running"))
    capabilities = (await engine.hello()).capabilities
    assert (SCORES in capabilities, PAUSED_SCORES in capabilities) == (True, False)
    lease = await engine.pause(PauseSpec(), 30)
    error = await _refused(engine.score([[1, 2, 3]], lease.lease_id, 5))
    assert error.reason is Reason.ENGINE_UNSUPPORTED
    assert "use --gate after" in error.message


async def test_one_that_generates_nothing_scores_nothing() -> None:
    llm = Scored()
    llm.vllm_config.model_config.runner_type = "pooling"
    engine = await _engine(llm)
    assert SCORES not in (await engine.hello()).capabilities
    error = await _refused(engine.score([[1, 2, 3]], "", 5))
    assert (error.reason, "use --gate off" in error.message) == (Reason.ENGINE_UNSUPPORTED, True)


@pytest.mark.parametrize("mode", ["raw_logits", "processed_logits"])
async def test_one_that_returns_logits_for_log_probabilities_scores_nothing(mode: str) -> None:
    llm = Scored()
    llm.vllm_config.model_config.logprobs_mode = mode
    engine = await _engine(llm)
    assert SCORES not in (await engine.hello()).capabilities
    error = await _refused(engine.score([[1, 2, 3]], "", 5))
    assert (error.reason, "use --gate off" in error.message) == (Reason.ENGINE_UNSUPPORTED, True)


@pytest.mark.parametrize(
    ("sequences", "limit_s", "text"),
    [
        ([], 5, "send 1 to 64 sequences"),
        ([[1, 2]] * 65, 5, "send 1 to 64 sequences"),
        ([[1, 2]], 0, "a limit of at most 60 s"),
        ([[1, 2]], 61, "a limit of at most 60 s"),
        ([[1, 2], [1]], 5, "use probes of 2 to 99 tokens for this engine: probe 1 has 1"),
        ([[1] * 100], 5, "probe 0 has 100"),
        ([[1, 50]], 5, "use token ids below 50"),
    ],
)
async def test_what_it_cannot_score_is_refused(
    sequences: list[list[int]], limit_s: float, text: str
) -> None:
    engine = await _engine(Scored())
    error = await _refused(engine.score(sequences, "", limit_s))
    assert (error.reason, text in error.message) == (Reason.REQUEST_INVALID, True), error.message
