"""What a rank hands out of its live parameters, and to which models nobody can attach."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.gpu.ipc import DeviceError, Place
from weightsync.shm.live_views import DOCUMENT, HANDLES, MEMORY, LiveViews
from weightsync.shm.segment_socket import SegmentServer
from weightsync.vllm.apply.device_ops import RankPrepared
from weightsync.vllm.plan import load_watch
from weightsync.vllm.plan.live_params import LiveParameters, Targets
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError, Slice, row_major
from weightsync.vllm.plan.load_watch import move_parameters
from weightsync.vllm.worker import live_memory
from weightsync.vllm.worker.live_memory import ModelFacts, facts_of, hand_out

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_FACTS = ModelFacts("/models/m", {"layers": 2})


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SegmentServer]:
    monkeypatch.setattr(load_watch, "_segments", [])
    made = SegmentServer(tmp_path / "s.sock")
    yield made
    made.close()


def _target(model: torch.nn.Module) -> RankPrepared:
    part = row_major(4, (2, 4))
    slices = (Slice("half", "weight", row_major(0, (2, 4)), part, cast=False),)
    plan = LoadPlan("s", {"half": ("F32", (2, 4))}, slices, {"weight": "F32"})
    targets = Targets(LiveParameters(model), slices)
    return RankPrepared("a", "c", (), {}, plan, (), (), targets)


def _handed_out(server: SegmentServer, target: Any, facts: ModelFacts = _FACTS) -> Any:
    future = server.expect_offer("offer/0/0/1")
    hand_out(str(server.path), "offer", "0/0/1", facts, target)
    files = {name: (size, fd) for name, size, fd in future.result(10)}
    found = {name: os.pread(fd, size, 0) for name, (size, fd) in files.items()}
    for _, fd in files.values():
        os.close(fd)
    return found


def test_a_box_names_its_place_in_the_memory_that_comes_with_it(server: SegmentServer) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    move_parameters(model)
    found = _handed_out(server, _target(model))
    views = LiveViews.from_json(found[DOCUMENT])
    assert (views.rank, views.checkpoint, views.config) == ("0/0/1", "/models/m", {"layers": 2})
    assert not views.device
    (box,) = views.boxes
    assert (box.tensor, box.dtype, box.shape, box.offsets) == ("half", "F32", (2, 4), (0, 0))
    there = torch.frombuffer(bytearray(found[MEMORY]), dtype=torch.float32, offset=box.begin)
    assert torch.equal(there[:8].reshape(2, 4), model.weight[1:3])


def test_parameters_in_private_memory_are_refused_with_the_setting(server: SegmentServer) -> None:
    with pytest.raises(PlanRefusedError, match="WEIGHTSYNC_ATTACH=1"):
        hand_out(str(server.path), "offer", "0/0/0", _FACTS, _target(torch.nn.Linear(4, 4)))


def test_what_vllm_computes_from_a_checkpoint_is_refused(server: SegmentServer) -> None:
    loaded: Any = SimpleNamespace()
    with pytest.raises(PlanRefusedError, match="no view of them is a tensor of the checkpoint"):
        hand_out(str(server.path), "offer", "0/0/0", _FACTS, loaded)


def test_handles_are_in_a_file_of_their_own_and_in_no_document(
    server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(4, 4, bias=False)
    handle = bytes(range(64))
    place = Place(b"u" * 16, handle, 640)
    monkeypatch.setattr(live_memory, "place_of", lambda *_: place)
    monkeypatch.setattr(live_memory, "_memory", lambda _: live_memory._DeviceMemory())
    found = _handed_out(server, _target(model))
    assert found.keys() == {DOCUMENT, HANDLES}
    assert found[HANDLES] == handle
    assert handle.hex().encode() not in found[DOCUMENT]
    views = LiveViews.from_json(found[DOCUMENT])
    assert views.device == b"u" * 16
    assert (views.boxes[0].memory, views.boxes[0].begin) == (0, 640)


def test_memory_of_a_gpu_that_cannot_be_shared_is_refused_with_why(
    server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def place_of(*_: Any) -> Place:
        raise DeviceError("cuIpcGetMemHandle answered 1")

    monkeypatch.setattr(live_memory, "place_of", place_of)
    monkeypatch.setattr(live_memory, "_memory", lambda _: live_memory._DeviceMemory())
    with pytest.raises(PlanRefusedError, match=r"expandable_segments.*answered 1"):
        hand_out(str(server.path), "o", "0/0/0", _FACTS, _target(torch.nn.Linear(4, 4)))


@pytest.mark.parametrize("sleeps", [False, True])
def test_facts_name_the_model_and_refuse_sleep_mode(server: SegmentServer, *, sleeps: bool) -> None:
    config = SimpleNamespace(to_json_string=lambda **_: json.dumps({"layers": 2}))
    model = SimpleNamespace(model="/models/m", hf_config=config, enable_sleep_mode=sleeps)
    facts = facts_of(SimpleNamespace(vllm_config=SimpleNamespace(model_config=model)))
    assert facts[:2] == _FACTS[:2]
    assert bool(facts.refusal) is sleeps
    if sleeps:
        with pytest.raises(PlanRefusedError, match="--enable-sleep-mode"):
            hand_out(str(server.path), "o", "0/0/0", facts, _target(torch.nn.Linear(4, 4)))
