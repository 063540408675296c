"""Which engines are not supported, one sentence each. Decided from vLLM's config at start."""

from __future__ import annotations

from typing import Any

__all__ = ["config_refusals"]


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
            config.speculative_config is not None,
            (
                "draft and speculative models are not supported; start vLLM without "
                "--speculative-config"
            ),
        ),
    )
