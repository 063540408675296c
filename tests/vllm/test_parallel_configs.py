"""What vLLM itself makes of its flags for ranks and caches, and what is refused of that."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import make_checkpoint
from weightsync.vllm.bridge.llm_calls import EngineCores, VllmCalls, node_count
from weightsync.vllm.bridge.support import config_refusals

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {arch: make_checkpoint(root / arch, arch) for arch in ("qwen2", "qwen3_moe")}


def _config(model: Path, api_servers: int = 1, **flags: Any) -> Any:
    from vllm import AsyncEngineArgs

    given = AsyncEngineArgs(model=str(model), max_model_len=512, enforce_eager=True, **flags)
    given._api_process_count = api_servers
    return given.create_engine_config()


def _cores(count: int) -> EngineCores:
    client: Any = SimpleNamespace(core_engines=list(range(count)), call_utility_all_async=None)
    return EngineCores(client)


def test_workers_of_one_core_on_several_nodes_are_driven(models: dict[str, Path]) -> None:
    flags: dict[str, Any] = {"master_addr": "127.0.0.1", "distributed_executor_backend": "mp"}
    config = _config(models["qwen2"], nnodes=2, node_rank=0, tensor_parallel_size=2, **flags)
    assert config_refusals(config, _cores(1)) == ()
    assert node_count(config) == 2
    llm = SimpleNamespace(vllm_config=config, engine_core=SimpleNamespace())
    # What needs every rank on this host is not offered.
    assert not {"between_steps", "reads_arrivals", "loads_versions"} & VllmCalls(llm).capabilities


def test_replicas_without_experts_are_vllms_of_their_own(models: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match="launch independent vLLM instances"):
        _config(models["qwen2"], data_parallel_size=2, data_parallel_rank=0)


@pytest.mark.parametrize(
    ("flags", "cores", "sentence"),
    [
        ({"data_parallel_size": 2, "data_parallel_rank": 0}, 1, "load balancer"),
        ({"data_parallel_size": 2, "api_servers": 2}, 2, "--api-server-count 1"),
    ],
    ids=["external", "api-servers"],
)
def test_ranks_that_nobody_reaches_all_of_are_refused(
    models: dict[str, Path], flags: dict[str, Any], cores: int, sentence: str
) -> None:
    (told,) = config_refusals(_config(models["qwen3_moe"], **flags), _cores(cores))
    assert sentence in told
    assert ". " not in told


_CHILDREN = [
    {"kv_connector": name, "kv_role": "kv_both"} for name in ("LMCacheConnectorV1", "NixlConnector")
]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            {"kv_transfer_config": {"kv_connector": name, "kv_role": "kv_both"}},
            f"the KV connector {name} is not supported",
        )
        for name in (
            "LMCacheConnectorV1",
            "FlexKVConnectorV1",
            "HF3FSKVConnector",
            "OffloadingConnector",
            "ExampleConnector",
        )
    ]
    + [
        (
            {
                "kv_transfer_config": {
                    "kv_connector": "MultiConnector",
                    "kv_role": "kv_both",
                    "kv_connector_extra_config": {"connectors": _CHILDREN},
                }
            },
            "MultiConnector (LMCacheConnectorV1, NixlConnector) is not supported",
        ),
        ({"kv_offloading_size": 1}, "the KV connector OffloadingConnector is not supported"),
        (
            {"ec_transfer_config": {"ec_connector": "ECExampleConnector", "ec_role": "ec_both"}},
            "the encoder cache connector ECExampleConnector is not supported",
        ),
        (
            {"ec_manager_config": {"encoder_cache_manager_cls": "others.Manager"}},
            "the encoder cache manager others.Manager is not supported",
        ),
    ],
)
def test_caches_outside_of_the_engine_are_refused(
    models: dict[str, Path], flags: dict[str, Any], told: str
) -> None:
    from vllm.config import ECTransferConfig, KVTransferConfig

    kinds = {"kv_transfer_config": KVTransferConfig, "ec_transfer_config": ECTransferConfig}
    made = {name: kinds[name](**given) if name in kinds else given for name, given in flags.items()}
    (sentence,) = config_refusals(_config(models["qwen2"], **made), _cores(1))
    assert told in sentence
    assert ". " not in sentence
