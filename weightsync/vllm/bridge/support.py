"""What an engine says of itself at a hello, and which engines and pauses are refused."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from weightsync.engine import EngineInfo, EngineState, OnExpiry, PauseSpec
from weightsync.engine.leases import MAX_LEASE_S
from weightsync.errors import invalid_request
from weightsync.vllm.bridge.llm_calls import EngineCores, VllmCalls, node_count
from weightsync.vllm.draft import draft_refusals

_MODES = ("keep", "wait", "abort")
_ACCEPT = (
    ", or with WEIGHTSYNC_ACCEPT_CACHES=1 in its environment if answers that old weights took part "
    "in are acceptable"
)
#: Longest name of an apply; it is shown to whoever is refused.
_MAX_ID_BYTES = 64
#: Settings of vLLM's environment, and what each lets strangers do.
_UNSAFE = {
    "VLLM_SERVER_DEV_MODE": (
        "start vLLM without VLLM_SERVER_DEV_MODE=1, or let no one else reach its port: its "
        "development endpoints have no authentication, and one request there replaces weights "
        "without this server"
    ),
    "VLLM_ALLOW_INSECURE_SERIALIZATION": (
        "start vLLM without VLLM_ALLOW_INSECURE_SERIALIZATION=1: with it, vLLM unpickles "
        "requests, which runs their code"
    ),
}


def check_pause(spec: PauseSpec, lease_s: float) -> None:
    if spec.mode not in _MODES or spec.after_wait not in ("keep", "abort"):
        raise invalid_request(
            f"pause mode {spec.mode!r} then {spec.after_wait!r}; use keep, wait or abort, and keep "
            "or abort after wait"
        )
    if not 0 < lease_s <= MAX_LEASE_S:
        raise invalid_request(f"lease_s is {lease_s}; use more than 0 and up to 3600")
    if spec.on_expiry is OnExpiry.FENCE and (
        spec.apply is None or not 0 < len(spec.apply.apply_id.encode()) <= _MAX_ID_BYTES
    ):
        raise invalid_request(
            f"a pause that fences on expiry names its apply in 1 to {_MAX_ID_BYTES} bytes"
        )


def config_refusals(
    config: Any, cores: EngineCores, *, accept_caches: bool = False
) -> tuple[str, ...]:
    """Return why this vLLM is not supported, a sentence each.

    With `accept_caches`, caches outside of the engine are no reason.
    """
    parallel = config.parallel_config
    return (
        *_of_reach(parallel, cores),
        *_of_parallel(parallel),
        *_of_model(config),
        *(f"{why}; {remedy}{_ACCEPT}" for why, remedy in _of_caches(config) if not accept_caches),
    )


def accepted_caches(config: Any) -> tuple[str, ...]:
    """Return what may go wrong with each cache outside of the engine, a sentence each."""
    return tuple(
        f"WEIGHTSYNC_ACCEPT_CACHES=1 accepts wrong answers after an apply: {why}; {remedy}"
        for why, remedy in _of_caches(config)
    )


def safety_warnings() -> tuple[str, ...]:
    """Return what makes this process's vLLM less safe than it need be, a sentence each."""
    from vllm import envs

    return tuple(text for name, text in _UNSAFE.items() if getattr(envs, name, False))


def _of_reach(parallel: Any, cores: EngineCores) -> Iterator[str]:
    """Every rank must be reached from here, and reach the segments of this host."""
    size = parallel.data_parallel_size
    balanced = _any(parallel, "data_parallel_external_lb", "data_parallel_hybrid_lb")
    local = getattr(parallel, "data_parallel_size_local", size)
    apart = size > 1 and not (cores.answer_each and hasattr(parallel, "data_parallel_index"))
    if balanced:
        yield (
            "an external or hybrid data parallel load balancer is not supported, because data "
            "parallel ranks pause together and each API server reaches only its own; start "
            "vLLM without --data-parallel-external-lb, --data-parallel-hybrid-lb and "
            "--data-parallel-rank, and replicas that share no experts as vLLMs of their own"
        )
    if int(getattr(parallel, "_api_process_count", 1) or 1) > 1:
        yield (
            "several API server processes are not supported, and vllm serve starts one per "
            "data parallel rank; pass --api-server-count 1"
        )
    if _any(parallel, "use_ray") or getattr(parallel, "data_parallel_backend", "") == "ray":
        yield (
            "Ray is not supported, because its workers may be on other hosts than the weights; "
            "pass --distributed-executor-backend mp and --data-parallel-backend mp"
        )
    if local < size and not balanced:
        yield (
            "data parallel ranks on other hosts are not supported, because no server stages "
            "weights for them; start one vLLM per host, or spread one rank's workers with "
            "--nnodes"
        )
    if size > 1 and getattr(parallel, "nnodes", 1) > 1:
        yield (
            "--nnodes with data parallel ranks is not supported, because which of them are on "
            "which node is not known; start vLLM without --data-parallel-size"
        )
    if apart or (cores.count != size and not balanced):
        yield (
            f"{cores.count} engine cores answer for data parallel size {size}, or not one by "
            "one; use a vLLM release from 0.26 to 0.33"
        )


def _any(parallel: Any, *names: str) -> bool:
    return any(getattr(parallel, name, False) for name in names)


def _of_parallel(parallel: Any) -> Iterator[str]:
    if _any(parallel, "enable_elastic_ep"):
        yield (
            "elastic expert parallelism is not supported, because workers that join later get "
            "weights that were never verified; start vLLM without --enable-elastic-ep"
        )
    if getattr(parallel, "prefill_context_parallel_size", 1) > 1:
        yield "prefill context parallelism is not supported; set its size to 1"
    if _any(parallel, "enable_eplb"):
        yield (
            "expert load balancing (EPLB) is not supported, because it moves experts between "
            "ranks while the engine runs; start vLLM without --enable-eplb"
        )


def _of_model(config: Any) -> Iterator[str]:
    if config.lora_config is not None:
        yield "LoRA is not supported; start vLLM without --enable-lora"
    yield from draft_refusals(config)


def _of_caches(config: Any) -> Iterator[tuple[str, str]]:
    """Yield why a cache outside of the engine is refused, and the remedy.

    It keeps what old weights made, and does not say of which.
    """
    keys = _connectors(getattr(config, "kv_transfer_config", None), "kv_connector")
    encoded = _connectors(getattr(config, "ec_transfer_config", None), "ec_connector")
    if keys:
        yield (
            (
                f"the KV connector {keys} is not supported, because keys that it keeps or sends "
                "outlive the weights that computed them"
            ),
            "start vLLM without --kv-transfer-config and --kv-offloading-size",
        )
    if encoded:
        yield (
            (
                f"the encoder cache connector {encoded} is not supported, because what it keeps or "
                "sends outlives the weights that computed it"
            ),
            "start vLLM without --ec-transfer-config",
        )
    custom = getattr(config, "ec_manager_config", None)
    if manager := getattr(custom, "encoder_cache_manager_cls", None):
        yield (
            (
                f"the encoder cache manager {manager} is not supported, because vLLM does not "
                "guarantee that it discards what old weights computed"
            ),
            "start vLLM without --ec-manager-config",
        )


def _connectors(transfer: Any, kind: str) -> str:
    name = getattr(transfer, kind, None) or ""
    extra = getattr(transfer, f"{kind}_extra_config", None) or {}
    parts = extra.get("connectors", ()) if isinstance(extra, dict) else ()
    inner = [str(one.get(kind)) for one in parts if isinstance(one, dict) and one.get(kind)]
    return f"{name} ({', '.join(inner)})" if name and inner else str(name)


def describe(
    vllm: VllmCalls,
    vllm_version: str,
    kind: str,
    ranks: tuple[str, ...],
    *,
    accept_caches: bool,
) -> EngineInfo:
    """Return what an engine is that has just started, under an id of its own.

    `kind` is `bridge` or `embedded`; `ranks` are in the order of worker replies.
    """
    config = vllm.config
    return EngineInfo(
        engine_id=secrets.token_hex(8),
        vllm_version=vllm_version,
        ranks=ranks,
        capabilities=vllm.capabilities,
        refusals=config_refusals(config, vllm.cores, accept_caches=accept_caches),
        state=EngineState.UNRECONCILED,
        reason="",
        model=str(config.model_config.model),
        kind=kind,
        warnings=(*safety_warnings(), *(accepted_caches(config) if accept_caches else ())),
        nodes=node_count(config),
        served_model_name=config.model_config.served_model_name,
    )
