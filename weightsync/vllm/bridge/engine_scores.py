"""Scores sequences with what an engine holds: in a pause, or beside generation."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

from weightsync.engine import PAUSED_SCORES, SCORES
from weightsync.errors import Reason, WeightSyncError, invalid_request
from weightsync.vllm.bridge.llm_calls import EngineCores, guarded
from weightsync.vllm.scoring.live_scores import live_scores
from weightsync.vllm.scoring.paused_scores import CAN_SCORE, SCORE

logger = logging.getLogger(__name__)

#: Most sequences, and tokens of one.
MAX_SEQUENCES, MAX_TOKENS = 64, 512
#: Longest time, seconds.
MAX_S = 60.0
#: How much longer than its limit an engine core may take, seconds: its last step is not cut short.
_GRACE_S = 5.0


class EngineScores:
    """Returns the log probabilities of sequences of tokens.

    Args:
        llm: vLLM's AsyncLLM.
        cores: Its engine cores.

    Attributes:
        capabilities: What it can do; `begin` finds out.
    """

    def __init__(self, llm: Any, cores: EngineCores) -> None:
        self.capabilities: frozenset[str] = frozenset()
        self._llm = llm
        self._cores = cores

    async def begin(self) -> None:
        """Find out what this vLLM can do."""
        config = self._llm.vllm_config
        generates = getattr(config.model_config, "runner_type", "generate") == "generate"
        cache = getattr(config, "cache_config", None)
        logits = getattr(config.model_config, "logprobs_mode", "raw_logprobs").endswith("_logits")
        if not generates or logits or getattr(cache, "kv_sharing_fast_prefill", False):
            # vLLM computes no prompt logprobs then, or returns logits as such.
            return
        self.capabilities = frozenset({SCORES})
        if self._cores.count > 1:
            return
        try:
            why = str(await self._cores.ask_one(CAN_SCORE))
        except Exception as error:  # noqa: BLE001 - it becomes a sentence
            why = str(error)[:200]
        if why:
            logger.warning("weightsync: nothing is scored in a pause, for vLLM lacks %s", why)
        else:
            self.capabilities |= {PAUSED_SCORES}

    def check(self, sequences: Sequence[Sequence[int]], limit_s: float, *, paused: bool) -> None:
        """Refuse what this engine does not score.

        Raises:
            WeightSyncError: REQUEST_INVALID or ENGINE_UNSUPPORTED.
        """
        if (PAUSED_SCORES if paused else SCORES) not in self.capabilities:
            raise WeightSyncError(
                Reason.ENGINE_UNSUPPORTED,
                "this engine scores sequences beside generation only; use --gate after"
                if self.capabilities
                else "this engine computes no log probabilities of prompts; use --gate off",
            )
        if not 0 < len(sequences) <= MAX_SEQUENCES or not 0 < limit_s <= MAX_S:
            raise invalid_request(
                f"send 1 to {MAX_SEQUENCES} sequences, and a limit of at most {MAX_S:g} s"
            )
        model = self._llm.vllm_config.model_config
        longest = min(MAX_TOKENS, int(model.max_model_len) - 1)
        vocabulary = int(model.get_vocab_size())
        for at, tokens in enumerate(sequences):
            if not 2 <= len(tokens) <= longest:
                raise invalid_request(
                    f"use probes of 2 to {longest} tokens for this engine: probe {at} has "
                    f"{len(tokens)}"
                )
            if max(tokens) >= vocabulary:
                raise invalid_request(
                    f"use token ids below {vocabulary}, which the vocabulary of this engine has: "
                    f"probe {at} has {max(tokens)}"
                )

    async def paused(self, sequences: Sequence[Sequence[int]], limit_s: float) -> list[list[float]]:
        """Score while the engine core stands still; everything in flight is as it was then."""
        call = self._cores.ask_one(SCORE, [list(one) for one in sequences], limit_s)
        async with _within(limit_s + _GRACE_S):
            answer = await guarded(call)
        if "error" in answer:
            raise WeightSyncError(Reason.DEADLINE_EXCEEDED, str(answer["error"]))
        return [list(one) for one in answer["scores"]]

    async def live(self, sequences: Sequence[Sequence[int]], limit_s: float) -> list[list[float]]:
        """Score by requests of their own."""
        async with _within(limit_s):
            return await guarded(live_scores(self._llm, sequences))


@contextlib.asynccontextmanager
async def _within(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError:
        raise WeightSyncError(
            Reason.DEADLINE_EXCEEDED, f"the probes were not scored within {seconds:g} s"
        ) from None
