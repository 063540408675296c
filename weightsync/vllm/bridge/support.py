"""What is refused, one sentence each: engines that are not supported, pauses that mean nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from weightsync.engine import OnExpiry
from weightsync.engine.pause_lease import MAX_LEASE_S
from weightsync.errors import Reason, WeightSyncError
from weightsync.vllm.draft import draft_refusals

if TYPE_CHECKING:
    from weightsync.engine import PauseSpec
    from weightsync.vllm.bridge.engine_cores import EngineCores

__all__ = ["check_pause", "config_refusals", "safety_warnings"]

_MODES = ("keep", "wait", "abort")
#: Longest name of an apply; it is shown to whoever is refused.
_MAX_ID_BYTES = 64
#: Settings of vLLM's environment, and what each lets strangers do.
_UNSAFE = {
    "VLLM_SERVER_DEV_MODE": (
        "vLLM serves its development endpoints and asks nobody who calls: one request replaces "
        "weights behind this server's back; start vLLM without VLLM_SERVER_DEV_MODE=1, or let "
        "nobody else reach its port"
    ),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": (
        "vLLM unpickles what requests hold, which runs their code; start vLLM without "
        "VLLM_ALLOW_INSECURE_SERIALIZATION=1"
    ),
}


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
    if spec.on_expiry is OnExpiry.FENCE and (
        spec.apply is None or not 0 < len(spec.apply.apply_id.encode()) <= _MAX_ID_BYTES
    ):
        raise WeightSyncError(
            Reason.REQUEST_INVALID,
            f"a pause that fences on expiry names its apply in 1 to {_MAX_ID_BYTES} bytes",
        )


def config_refusals(config: Any, cores: EngineCores) -> tuple[str, ...]:
    """Return why an engine of this VllmConfig is not supported; empty when it is.

    Args:
        config: vLLM's VllmConfig.
        cores: The engine cores that this process reaches.
    """
    parallel = config.parallel_config
    checks = (
        *_reach_checks(parallel, cores),
        *_parallel_checks(parallel),
        *_model_checks(config),
        *_cache_checks(config),
    )
    return tuple(sentence for refused, sentence in checks if refused)


def safety_warnings() -> tuple[str, ...]:
    """Return what makes this process's vLLM less safe than it need be, a sentence each."""
    from vllm import envs

    return tuple(text for name, text in _UNSAFE.items() if getattr(envs, name, False))


def _reach_checks(parallel: Any, cores: EngineCores) -> tuple[tuple[bool, str], ...]:
    """Every rank must be reached from here, and reach the segments of this host."""
    size = parallel.data_parallel_size
    balanced = _any(parallel, "data_parallel_external_lb", "data_parallel_hybrid_lb")
    local = getattr(parallel, "data_parallel_size_local", size)
    apart = size > 1 and not (cores.answer_each and hasattr(parallel, "data_parallel_index"))
    return (
        (
            balanced,
            (
                "an external or hybrid data parallel load balancer is not supported, because data "
                "parallel ranks pause together and each API server reaches only its own; start "
                "vLLM without --data-parallel-external-lb, --data-parallel-hybrid-lb and "
                "--data-parallel-rank, and replicas that share no experts as vLLMs of their own"
            ),
        ),
        (
            int(getattr(parallel, "_api_process_count", 1) or 1) > 1,
            (
                "several API server processes are not supported, and vllm serve starts one per "
                "data parallel rank; pass --api-server-count 1"
            ),
        ),
        (
            _any(parallel, "use_ray") or getattr(parallel, "data_parallel_backend", "") == "ray",
            (
                "Ray is not supported, because its workers may be on other hosts than the weights; "
                "pass --distributed-executor-backend mp and --data-parallel-backend mp"
            ),
        ),
        (
            local < size and not balanced,
            (
                "data parallel ranks on other hosts are not supported, because nobody stages "
                "weights for them; start one vLLM per host, or spread one rank's workers with "
                "--nnodes"
            ),
        ),
        (
            size > 1 and getattr(parallel, "nnodes", 1) > 1,
            (
                "--nnodes with data parallel ranks is not supported, because which of them are on "
                "which node is not known; start vLLM without --data-parallel-size"
            ),
        ),
        (
            apart or (cores.count != size and not balanced),
            (
                f"{cores.count} engine cores answer for data parallel size {size}, or not one by "
                "one; use a vLLM release from 0.26 to 0.33"
            ),
        ),
    )


def _any(parallel: Any, *names: str) -> bool:
    return any(getattr(parallel, name, False) for name in names)


def _parallel_checks(parallel: Any) -> tuple[tuple[bool, str], ...]:
    return (
        (
            _any(parallel, "enable_elastic_ep"),
            (
                "elastic expert parallelism is not supported, because workers that join later get "
                "weights that nobody has proved; start vLLM without --enable-elastic-ep"
            ),
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism is not supported; set its size to 1",
        ),
        (
            _any(parallel, "enable_eplb"),
            (
                "expert load balancing (EPLB) is not supported, because it moves experts between "
                "ranks while the engine runs; start vLLM without --enable-eplb"
            ),
        ),
    )


def _model_checks(config: Any) -> tuple[tuple[bool, str], ...]:
    return (
        (
            config.lora_config is not None,
            "LoRA is not supported; start vLLM without --enable-lora",
        ),
        *draft_refusals(config),
    )


def _cache_checks(config: Any) -> tuple[tuple[bool, str], ...]:
    """Caches outside of the engine keep what old weights made, and do not say of which."""
    keys = _connectors(getattr(config, "kv_transfer_config", None), "kv_connector")
    encoded = _connectors(getattr(config, "ec_transfer_config", None), "ec_connector")
    return (
        (
            bool(keys),
            (
                f"the KV connector {keys} is not supported, because keys that it keeps or sends "
                "outlive the weights that made them; start vLLM without --kv-transfer-config and "
                "--kv-offloading-size"
            ),
        ),
        (
            bool(encoded),
            (
                f"the encoder cache connector {encoded} is not supported, because what it keeps or "
                "sends outlives the weights that made it; start vLLM without --ec-transfer-config"
            ),
        ),
    )


def _connectors(transfer: Any, kind: str) -> str:
    """Return the name of a connector, with those that it is made of; "": there is none."""
    name = getattr(transfer, kind, None) or ""
    extra = getattr(transfer, f"{kind}_extra_config", None) or {}
    parts = extra.get("connectors", ()) if isinstance(extra, dict) else ()
    inner = [str(one.get(kind)) for one in parts if isinstance(one, dict) and one.get(kind)]
    return f"{name} ({', '.join(inner)})" if name and inner else str(name)
