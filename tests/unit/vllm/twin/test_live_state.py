"""What was live lies in the arena afterwards, and comes back by the same exchange."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from weightsync.vllm.apply.byte_rows import row_digests, rows_of
from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.plan.live_params import ParameterChangedError
from weightsync.vllm.twin.live_state import ExchangedMemory, LoadedVersion
from weightsync.vllm.twin.model_state import ModelState, state_of

if TYPE_CHECKING:
    from collections.abc import Sequence

THREADS = SliceThreads(2)
OPS = HostOps(torch.device("cpu"))
PATHS = {"weight", "bias"}


def version(name: str, memory: Sequence[torch.Tensor]) -> LoadedVersion:
    return LoadedVersion(name, tuple(row_digests(OPS, rows_of(memory), THREADS)))


@pytest.fixture
def model() -> torch.nn.Linear:
    return torch.nn.Linear(64, 300)


@pytest.fixture
def state(model: torch.nn.Linear) -> ModelState:
    return state_of(model, PATHS)


@pytest.fixture
def memory(state: ModelState) -> ExchangedMemory:
    arena = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in state.form.spans]
    made = ExchangedMemory(state, arena, OPS, THREADS)
    made.in_model, made.in_arena = version("old", state.memory), version("new", arena)
    return made


def test_an_exchange_is_its_own_way_back(memory: ExchangedMemory, state: ModelState) -> None:
    old, new = memory.in_model, memory.in_arena
    assert old is not None
    assert new is not None
    memory.write(new, THREADS)
    assert memory.unlike(new, THREADS) == []
    assert version("new", state.memory) == new
    assert memory.has("old") == old
    memory.write(old, THREADS)
    assert memory.unlike(old, THREADS) == []
    assert version("old", state.memory) == old
    assert memory.has("new") == new


def test_what_broke_off_in_the_middle_is_put_back(
    memory: ExchangedMemory, state: ModelState, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = memory.in_model, memory.in_arena
    assert old is not None
    assert new is not None

    def half(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HalfExchange:
        return HalfExchange(pairs[:1])

    monkeypatch.setattr(OPS, "exchange", half)
    broken = ExchangedMemory(state, [row.clone() for row in memory._spare], OPS, THREADS)
    monkeypatch.undo()
    broken.in_model, broken.in_arena = old, new
    with pytest.raises(OSError, match="broke off"):
        broken.write(new, THREADS)
    assert broken.unlike(new, THREADS)
    assert broken.unlike(old, THREADS)
    broken.write(old, THREADS)
    assert broken.unlike(old, THREADS) == []
    # What lies beside it is not known any more: it must be loaded again.
    assert broken.has("new") is None


def test_what_lies_nowhere_is_refused(memory: ExchangedMemory) -> None:
    gone = LoadedVersion("gone", tuple(b"\0" * 16 for _ in memory._live))
    with pytest.raises(ParameterChangedError, match="loaded again"):
        memory.write(gone, THREADS)


def test_a_foreign_write_is_found_and_named(memory: ExchangedMemory, state: ModelState) -> None:
    old = memory.in_model
    assert old is not None
    state.memory[state.form.tensors["bias"].span][0] ^= 1
    assert memory.unlike(old) == ["bias"]
    assert memory.in_model is None


def test_what_was_only_loaded_counts_as_unproved(memory: ExchangedMemory) -> None:
    new = memory.in_arena
    assert new is not None
    assert not memory.has_proved("new")
    memory.write(new, THREADS)
    memory.unlike(new, THREADS)
    assert memory.has_proved("new")


def test_a_parameter_that_was_replaced_is_found(
    memory: ExchangedMemory, model: torch.nn.Linear
) -> None:
    memory.check_unmoved(state_of(model, PATHS))
    model.bias = torch.nn.Parameter(model.bias.detach().clone())
    with pytest.raises(ParameterChangedError, match="restart vLLM"):
        memory.check_unmoved(state_of(model, PATHS))


class HalfExchange:
    """Exchanges some of it and fails."""

    def __init__(self, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pairs = pairs

    def run(self, threads: SliceThreads) -> None:
        del threads
        for left, right in self._pairs:
            kept = left.clone()
            left.copy_(right)
            right.copy_(kept)
        msg = "it broke off"
        raise OSError(msg)
