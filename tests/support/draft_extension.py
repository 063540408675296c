"""A worker extension for tests: tells what the parameters of a draft hold."""

from __future__ import annotations

from typing import Any

from weightsync.vllm.plan.int_views import tensor_digest_of

__all__ = ["DraftExtension"]


class DraftExtension:
    """Mixed into vLLM's workers."""

    model_runner: Any

    def draft_digests(self) -> dict[str, str]:
        """Return the digest of every parameter that the draft has and the target has not."""
        target = {id(p) for p in self.model_runner.get_model().parameters()}
        draft = self.model_runner.drafter.model
        return {
            name: tensor_digest_of(parameter.detach()).hex()
            for name, parameter in draft.named_parameters()
            if id(parameter) not in target
        }
