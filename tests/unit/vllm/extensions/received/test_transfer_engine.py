"""The backend as vLLM's own factory makes it, after vLLM has loaded our plugin."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator
from vllm.distributed.weight_transfer.base import WeightTransferEngine
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from tests.support.processes import python_says
from weightsync.vllm.extensions.received.ipc_handles import to_plain
from weightsync.vllm.extensions.received.update_file import UpdateSink
from weightsync.vllm.extensions.received.verbs import register_transfer
from weightsync.vllm.worker_protocol import RECEIVING_BACKENDS


def _engine(rank: int = 0, ranks: int = 1, backend: str = "weightsync") -> Any:
    for _ in range(2):
        register_transfer()
    model = torch.nn.Linear(2, 2)
    parallel = SimpleNamespace(rank=rank, world_size=ranks)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=None)
    made = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device("cpu"), model
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


@pytest.mark.parametrize(("backend", "wire"), RECEIVING_BACKENDS.items())
def test_the_wire_is_vllms_own_and_never_has_the_model(backend: str, wire: str) -> None:
    engine, sink = _engine(backend=backend), UpdateSink(keeps=False)
    made = engine.make_wire(sink)
    assert type(made).__module__ == f"vllm.distributed.weight_transfer.{wire}_engine"
    assert made.config.backend == wire
    assert made.model is sink
    assert engine.model not in vars(made).values()
    made.shutdown()


class _Library:
    """Of NCCL's calls the one that ends what a device waits for."""

    def __init__(self) -> None:
        self.aborted: list[tuple[object, str]] = []

    def ncclCommAbort(self, comm: object) -> None:  # noqa: N802 - its name in the library
        self.aborted.append((comm, threading.current_thread().name))


def _communicator(library: _Library, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return vLLM's own communicator, made without a GPU."""
    monkeypatch.setattr(torch.accelerator, "device_index", lambda _: contextlib.nullcontext())
    made: Any = PyNcclCommunicator.__new__(PyNcclCommunicator)
    made.nccl, made.comm, made.device = library, object(), torch.device("cpu")
    made.available, made.disabled = True, False
    return made


@pytest.mark.parametrize("forgets", [False, True], ids=["its own", "that of 0.26"])
def test_what_a_device_waits_for_is_aborted_once_with_its_connection(
    monkeypatch: pytest.MonkeyPatch, forgets: bool
) -> None:
    engine = _engine(backend="weightsync_nccl")
    wire = engine.make_wire(UpdateSink(keeps=False))
    group = wire.model_update_group = _communicator(library := _Library(), monkeypatch)
    if forgets:
        wire.shutdown = lambda: setattr(wire, "model_update_group", None)
    engine.close_wire(wire)
    ((comm, thread),) = library.aborted
    assert comm is group.comm
    # The thread that generates never waits for it.
    assert thread != threading.current_thread().name
    assert wire.model_update_group is None
    engine.close_wire(wire)
    assert len(library.aborted) == 1


def test_a_transfer_without_a_communicator_is_closed() -> None:
    engine = _engine(backend="weightsync_ipc")
    engine.close_wire(engine.make_wire(UpdateSink(keeps=False)))


@pytest.mark.parametrize("backend", RECEIVING_BACKENDS)
def test_vllms_own_verbs_on_workers_are_refused_where_we_receive(backend: str) -> None:
    # As for "weightsync": they come where no API process stands before the workers.
    engine = _engine(backend=backend)
    with pytest.raises(RuntimeError, match="send the verbs of a weight transfer to"):
        engine.init_transfer_engine(engine.parse_init_info({}))
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    engine.start_weight_update()
    engine.update_weights({"names": ["weight"], "shapes": [[2, 2]], "dtype_names": ["float32"]})
    engine.finish_weight_update()
    for name, parameter in engine.model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_handles_are_made_of_plain_data_for_vllms_engine() -> None:
    engine = _engine(backend="weightsync_ipc")
    handle: tuple[Any, ...] = (
        torch.Tensor,
        (),
        (),
        0,
        torch.UntypedStorage,
        torch.int8,
        0,
        b"h",
        1,
        0,
        False,
    )
    handle += (b"c", 0, b"e", True)
    info = {"names": ["a"], "dtype_names": ["int8"], "shapes": [[]]}
    plain = info | {"ipc_handles": to_plain([{"GPU": handle}])}
    wire = engine.make_wire(UpdateSink(keeps=True))
    parsed = wire.parse_update_info(engine.own_update(plain))
    assert parsed.ipc_handles == [{"GPU": handle}]
    # What the API process sent stays as it was: it is parsed twice.
    assert plain["ipc_handles"] == to_plain([{"GPU": handle}])
    engine.end_update(wire)


def test_of_releases_with_a_class_for_each_config_that_one_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm.config import weight_transfer

    class Own(WeightTransferConfig):  # type: ignore[misc]  # Any here
        backend: str = "nccl"
        packed: bool = True

    monkeypatch.setattr(weight_transfer, "NCCLWeightTransferConfig", Own, raising=False)
    wire = _engine(backend="weightsync_nccl").make_wire(UpdateSink(keeps=False))
    assert wire.config.packed
