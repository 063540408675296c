"""What cannot work is refused at start, in one sentence that names the remedy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm.bridge.llm_calls import EngineCores
from weightsync.vllm.bridge.support import accepted_caches, config_refusals, safety_warnings
from weightsync.vllm.draft import draft_refusals


def _refusals(
    parallel: dict[str, Any],
    *,
    cores: int | None = None,
    client: Any = None,
    accept_caches: bool = False,
    **more: Any,
) -> tuple[str, ...]:
    sizes = {
        "data_parallel_size": 1,
        "data_parallel_index": 0,
        "pipeline_parallel_size": 1,
        "tensor_parallel_size": 1,
    }
    sizes |= parallel
    sizes = {name: value for name, value in sizes.items() if value is not None}
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(quantization=None, use_mla=False),
        lora_config=None,
        speculative_config=None,
        **more,
    )
    engines = range(sizes["data_parallel_size"] if cores is None else cores)
    client = client or SimpleNamespace(core_engines=list(engines), call_utility_all_async=None)
    return config_refusals(config, EngineCores(client), accept_caches=accept_caches)


@pytest.mark.parametrize(
    "parallel",
    [
        {},
        {"tensor_parallel_size": 4, "pipeline_parallel_size": 2},
        {"data_parallel_size": 2, "data_parallel_size_local": 2},
        {"data_parallel_size": 4, "tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"nnodes": 2, "tensor_parallel_size": 2},
        {"nnodes": 1, "_api_process_count": 1, "use_ray": False, "enable_elastic_ep": False},
    ],
    ids=["one", "stages", "replicas", "experts", "nodes", "defaults"],
)
def test_all_ranks_that_are_reached_from_here_are_supported(parallel: dict[str, Any]) -> None:
    assert _refusals(parallel) == ()


@pytest.mark.parametrize(
    ("parallel", "cores", "sentence"),
    [
        ({"data_parallel_size": 2, "data_parallel_external_lb": True}, 1, "load balancer"),
        ({"data_parallel_size": 4, "data_parallel_hybrid_lb": True}, 2, "load balancer"),
        ({"data_parallel_size": 2, "_api_process_count": 2}, 2, "--api-server-count 1"),
        ({"use_ray": True}, 1, "--distributed-executor-backend mp"),
        ({"data_parallel_size": 2, "data_parallel_backend": "ray"}, 2, "--data-parallel-backend"),
        ({"nnodes": 2, "data_parallel_size": 2}, 2, "without --data-parallel-size"),
        ({"data_parallel_size": 2, "data_parallel_size_local": 1}, 2, "one vLLM per host"),
        ({"data_parallel_size": 2}, 1, "1 engine cores answer for data parallel size 2"),
        ({"data_parallel_size": 2, "data_parallel_index": None}, 2, "from 0.26 to 0.33"),
        ({"enable_elastic_ep": True}, 1, "--enable-elastic-ep"),
        ({"enable_eplb": True}, 1, "--enable-eplb"),
        ({"prefill_context_parallel_size": 2}, 1, "prefill context"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    parallel: dict[str, Any], cores: int, sentence: str
) -> None:
    (told,) = _refusals(parallel, cores=cores)
    assert sentence in told
    assert ". " not in told


_CHILDREN = {"connectors": [{"kv_connector": "LMCacheConnectorV1"}, {"kv_connector": "Nixl"}]}


@pytest.mark.parametrize(
    ("name", "transfer", "told"),
    [
        ("kv", {"kv_connector": "LMCacheConnectorV1"}, "the KV connector LMCacheConnectorV1 is"),
        ("kv", {"kv_connector": "FlexKVConnectorV1"}, "connector FlexKVConnectorV1 is"),
        ("kv", {"kv_connector": "OffloadingConnector"}, "connector OffloadingConnector is"),
        ("kv", {"kv_connector": "of.others", "kv_connector_extra_config": {}}, "of.others is"),
        (
            "kv",
            {"kv_connector": "MultiConnector", "kv_connector_extra_config": _CHILDREN},
            "MultiConnector (LMCacheConnectorV1, Nixl) is not supported",
        ),
        ("ec", {"ec_connector": "ECExampleConnector"}, "connector ECExampleConnector is"),
    ],
)
def test_a_cache_outside_of_the_engine_is_refused_by_name(
    name: str, transfer: dict[str, Any], told: str
) -> None:
    config: dict[str, Any] = {f"{name}_transfer_config": SimpleNamespace(**transfer)}
    (sentence,) = _refusals({}, **config)
    assert told in sentence
    assert f"start vLLM without --{name}-transfer-config" in sentence
    assert "or with WEIGHTSYNC_ACCEPT_CACHES=1 in its environment" in sentence
    (warning,) = accepted_caches(SimpleNamespace(**config))
    assert told in warning
    assert _refusals({}, accept_caches=True, **config) == ()


@pytest.mark.parametrize("name", ["kv", "ec"])
def test_no_cache_outside_of_the_engine_is_none_to_refuse(name: str) -> None:
    for transfer in (None, SimpleNamespace(kv_connector=None, ec_connector=None)):
        config: dict[str, Any] = {f"{name}_transfer_config": transfer}
        assert _refusals({}, **config) == ()


def test_engine_cores_that_cannot_be_asked_one_by_one_are_refused() -> None:
    (told,) = _refusals(
        {"data_parallel_size": 2}, client=SimpleNamespace(core_engines=[b"0", b"1"])
    )
    assert "not one by one" in told


_GEMMA4 = SimpleNamespace(hf_config=SimpleNamespace(model_type="gemma4_mtp"))


def _drafted(parallel: dict[str, Any] | None = None, **spec: Any) -> tuple[str, ...]:
    draft = SimpleNamespace(tensor_parallel_size=1)
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            **{"tensor_parallel_size": 1, "pipeline_parallel_size": 1, **(parallel or {})}
        ),
        speculative_config=SimpleNamespace(**{"draft_parallel_config": draft, **spec}),
    )
    return tuple(draft_refusals(config))


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle", "eagle3", "mtp", "draft_model"])
def test_speculation_whose_weights_an_update_reaches_is_supported(method: str) -> None:
    assert _drafted(method=method) == ()


@pytest.mark.parametrize(
    ("spec", "parallel", "sentence"),
    [
        ({"method": "medusa"}, {}, "use eagle, eagle3, mtp, draft_model or ngram"),
        ({"method": "eagle3", "parallel_drafting": True}, {}, "parallel_drafting to false"),
        ({"method": "mtp", "draft_model_config": _GEMMA4}, {}, "gemma4_mtp is not supported"),
        ({"method": "mtp"}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size 1"),
        ({"method": "eagle"}, {"tensor_parallel_size": 2}, "a draft on 1 of 2 ranks"),
    ],
)
def test_other_speculation_is_refused_in_one_sentence(
    spec: dict[str, Any], parallel: dict[str, Any], sentence: str
) -> None:
    (told,) = _drafted(parallel, **spec)
    assert sentence in told
    assert ". " not in told


def test_what_lets_strangers_in_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert safety_warnings() == ()
    for count, name in enumerate(names, 1):
        monkeypatch.setenv(name, "1")
        warnings = safety_warnings()
        assert len(warnings) == count
        assert f"without {name}=1" in warnings[-1]
