"""What is refused, one sentence each: engines that are not supported, pauses that mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.bridge.pause_lease import MAX_LEASE_S

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec

__all__ = ["check_pause", "config_refusals"]

_MODES = ("keep", "wait", "abort")


def check_pause(spec: PauseSpec, lease_s: float) -> None:
    """Refuse a pause that means nothing.

    Args:
        spec: How to pause.
        lease_s: For how long.

    Raises:
        WeightSyncError: REQUEST_INVALID.
    """
    if spec.mode not in _MODES or spec.after_wait not in ("keep", "abort"):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"pause mode {spec.mode!r} then {spec.after_wait!r}; use keep, wait or abort, and keep "
            "or abort after wait",
        )
    if not 0 < lease_s <= MAX_LEASE_S:
        raise WeightSyncError(
            Reason.REQUEST_INVALID, f"a lease of {lease_s} s; use more than 0 and up to 3600"
        )


def config_refusals(config: Any) -> tuple[str, ...]:
    """Return why an engine of this VllmConfig is not supported; empty when it is.

    Args:
        config: vLLM's VllmConfig.
    """
    checks = (*_parallel_checks(config.parallel_config), *_model_checks(config))
    return tuple(sentence for refused, sentence in checks if refused)


def _parallel_checks(parallel: Any) -> tuple[tuple[bool, str], ...]:
    return (
        (
            parallel.data_parallel_size > 1,
            (
                f"data parallel size {parallel.data_parallel_size} is not supported; "
                "start one vLLM per replica"
            ),
        ),
        (
            parallel.pipeline_parallel_size > 1,
            (
                f"pipeline parallel size {parallel.pipeline_parallel_size} is not supported; "
                "use tensor parallelism"
            ),
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism is not supported; set its size to 1",
        ),
        (
            bool(getattr(parallel, "enable_eplb", False)),
            (
                "expert load balancing (EPLB) is not supported, because it moves experts between "
                "ranks while the engine runs; start vLLM without --enable-eplb"
            ),
        ),
        (
            int(getattr(parallel, "_api_process_count", 1) or 1) > 1,
            "several API server processes are not supported; pass --api-server-count 1",
        ),
    )


def _model_checks(config: Any) -> tuple[tuple[bool, str], ...]:
    return (
        (
            config.lora_config is not None,
            "LoRA is not supported; start vLLM without --enable-lora",
        ),
        (
            config.model_config.quantization is not None,
            (
                f"quantisation {config.model_config.quantization} is not supported; "
                "serve an unquantised checkpoint"
            ),
        ),
        (
            bool(getattr(config.model_config, "use_mla", False)),
            (
                "multi-head latent attention (MLA) is not supported yet, because vLLM computes "
                "from matrices that it makes of kv_b_proj; start vLLM with VLLM_MLA_DISABLE=1"
            ),
        ),
        (
            config.speculative_config is not None,
            (
                "draft and speculative models are not supported; start vLLM without "
                "--speculative-config"
            ),
        ),
    )
