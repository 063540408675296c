"""The backend as vLLM's own factory makes it, after vLLM has loaded our plugin."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tests.support.processes import python_says
from weightsync.vllm.transfer.registration import register_transfer


def _engine(rank: int = 0, ranks: int = 1) -> Any:
    for _ in range(2):
        register_transfer()
    model = torch.nn.Linear(2, 2)
    parallel = SimpleNamespace(rank=rank, world_size=ranks)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    made = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend="weightsync"), config, torch.device("cpu"), model
    )
    assert isinstance(made, WeightTransferEngine)
    return made


def test_vllm_finds_it_after_it_has_loaded_its_plugins() -> None:
    # A process of its own: the plugin changes vLLM for good.
    program = """
from types import SimpleNamespace
import torch
from vllm.plugins import load_general_plugins
load_general_plugins()
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory
from vllm.v1.engine.async_llm import AsyncLLM
parallel = SimpleNamespace(rank=0, world_size=1)
made = WeightTransferEngineFactory.create_engine(
    WeightTransferConfig(backend="weightsync"),
    SimpleNamespace(parallel_config=parallel, model_config=None),
    torch.device("cpu"),
    torch.nn.Linear(2, 2),
)
print(type(made).__name__, hasattr(AsyncLLM.update_weights, "_weightsync"))
"""
    assert python_says(program).splitlines()[-1] == "WeightSyncTransferEngine True"


def test_no_verb_touches_the_model() -> None:
    engine = _engine()
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    classes = {name: type(p) for name, p in engine.model.named_parameters()}
    engine.start_weight_update()
    engine.update_weights({"names": ["weight"], "shapes": [[2, 2]], "dtype_names": ["float32"]})
    engine.receive_weights(None)
    engine.finish_weight_update()
    engine.shutdown()
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, before[name])
        # Layerwise reload puts meta tensors and other loaders in their place.
        assert type(parameter) is classes[name]
        assert not vars(parameter)


def test_a_tensor_that_came_to_a_worker_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    _engine().update_weights({})
    assert "no weight was written" in caplog.text


@pytest.mark.parametrize("ranks", [1, 3])
def test_of_all_ranks_the_last_alone_refuses(ranks: int) -> None:
    # As vLLM's executor reads replies: in the order of the ranks, up to the first that failed.
    for rank in range(ranks):
        engine = _engine(rank, ranks)
        info = engine.parse_init_info({"master_address": "x"})
        if rank < ranks - 1:
            engine.init_transfer_engine(info)
        else:
            with pytest.raises(RuntimeError, match="send the verbs of a weight transfer to"):
                engine.init_transfer_engine(info)


def test_the_sender_of_old_releases_names_the_new_one() -> None:
    with pytest.raises(RuntimeError, match="WeightSyncTrainerEngine"):
        type(_engine()).trainer_send_weights(iter(()), {})
    assert not type(_engine()).supports_draft_weight_update
