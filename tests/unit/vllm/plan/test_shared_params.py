"""Parameters that move into shared memory."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weightsync.shm.segments import MemoryMapping
from weightsync.vllm.plan import load_watch
from weightsync.vllm.plan.load_watch import (
    move_parameters,
    share_loaded,
    shared_segments,
    unwatched,
)


@pytest.fixture(autouse=True)
def none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_watch, "_segments", [])


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
        self.second = torch.nn.Linear(8, 4, bias=False, dtype=torch.bfloat16)
        self.second.weight = self.first.weight
        self.register_buffer("steps", torch.arange(5))
        # What no list of parameters shows, as kernels keep it.
        self.kept = [self.first.weight.data.t(), torch.ones(3)]


def test_what_a_model_holds_stays_and_is_one_memory_with_who_maps_it() -> None:
    model = _Model()
    before = {name: value.detach().clone() for name, value in model.state_dict().items()}
    move_parameters(model)
    (segment,) = shared_segments()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
        assert 0 <= value.data_ptr() - segment.address < segment.capacity
    fd = segment.lend()
    other = MemoryMapping(fd, segment.capacity)
    os.close(fd)
    at = model.first.bias.data_ptr() - segment.address
    torch.frombuffer(other.view, dtype=torch.bfloat16, count=4, offset=at).fill_(7)
    assert model.first.bias.tolist() == [7.0] * 4


def test_what_shares_memory_goes_on_doing_so() -> None:
    model = _Model()
    ones = model.kept[1].data_ptr()
    move_parameters(model)
    assert model.second.weight is model.first.weight
    with torch.no_grad():
        model.first.weight.fill_(3)
    assert bool((model.kept[0] == 3).all())
    assert model.kept[0].shape == (8, 4)
    # No parameter lies there.
    assert model.kept[1].data_ptr() == ones


def test_what_has_moved_stays_when_a_draft_brings_it_again() -> None:
    target, draft = _Model(), _Model()
    move_parameters(target)
    place = target.first.weight.data_ptr()
    draft.first = target.first
    move_parameters(draft)
    assert target.first.weight.data_ptr() == place
    assert len(shared_segments()) == 2


def test_every_load_but_a_loader_s_own_moves_what_it_made() -> None:
    class Loader:
        def load_model(self, model: torch.nn.Module) -> torch.nn.Module:
            return model

    loaders: Any = SimpleNamespace(BaseModelLoader=Loader)
    share_loaded(loaders)
    share_loaded(loaders)
    with unwatched():
        Loader().load_model(_Model())
    assert not shared_segments()
    Loader().load_model(_Model())
    assert len(shared_segments()) == 1
