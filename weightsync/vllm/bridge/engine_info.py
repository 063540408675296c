"""What an engine says of itself at a hello, gathered once at its start."""

from __future__ import annotations

import secrets
from typing import TYPE_CHECKING

from weightsync.engine import EngineInfo, EngineState
from weightsync.vllm.bridge.llm_calls import node_count
from weightsync.vllm.bridge.support import config_refusals, safety_warnings

if TYPE_CHECKING:
    from weightsync.vllm.bridge.llm_calls import VllmCalls

__all__ = ["describe"]


def describe(vllm: VllmCalls, vllm_version: str, kind: str, ranks: tuple[str, ...]) -> EngineInfo:
    """Return what an engine is that has just started, under an id that no other start has.

    Args:
        vllm: The engine.
        vllm_version: Release of vLLM.
        kind: `bridge` or `embedded`.
        ranks: Their names, in the order of worker replies.
    """
    config = vllm.config
    return EngineInfo(
        engine_id=secrets.token_hex(8),
        vllm_version=vllm_version,
        ranks=ranks,
        capabilities=vllm.capabilities,
        refusals=config_refusals(config, vllm.cores),
        state=EngineState.UNRECONCILED,
        reason="",
        model=str(config.model_config.model),
        kind=kind,
        warnings=safety_warnings(),
        nodes=node_count(config),
    )
