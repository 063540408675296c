"""What was live lies in the arena afterwards, and comes back by the same exchange."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest
import torch

from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.apply.host_patch import row_digests, rows_of
from weightsync.vllm.apply.parallel import SliceThreads
from weightsync.vllm.plan.live_params import ParameterChangedError
from weightsync.vllm.shadow.live_state import ExchangedMemory, LoadedVersion
from weightsync.vllm.shadow.model_state import ModelState, state_of

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
    made = ExchangedMemory(state, OPS, THREADS)
    made.in_model = version("old", state.memory)
    load(made, "new")
    return made


def load(memory: ExchangedMemory, name: str, limit: int = 1) -> int:
    """Put a version of other bytes into the arena that a load may fill; return which it is."""
    arena = [torch.randint(0, 255, (size,), dtype=torch.uint8) for size in memory.form.spans]
    index = memory.replaceable(limit, name)
    memory.put_arena(index, arena)
    memory.set_version(index, version(name, arena))
    return index


def test_an_exchange_is_its_own_way_back(memory: ExchangedMemory, state: ModelState) -> None:
    old, new = memory.in_model, memory.has("new")
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
    old, new = memory.in_model, memory.has("new")
    assert old is not None
    assert new is not None

    def half(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> HalfExchange:
        return HalfExchange(pairs[:1])

    monkeypatch.setattr(OPS, "exchange", half)
    broken = ExchangedMemory(state, OPS, THREADS)
    broken.put_arena(0, [row.clone() for row in memory._arenas[0].rows])
    monkeypatch.undo()
    broken.in_model = old
    broken.set_version(0, new)
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


def test_one_arena_keeps_what_was_live_until_the_next_load(memory: ExchangedMemory) -> None:
    new = memory.has("new")
    assert new is not None
    memory.write(new, THREADS)
    assert load(memory, "third") == 0
    assert memory.has("old") is None


def test_two_arenas_keep_what_was_live_before(memory: ExchangedMemory, state: ModelState) -> None:
    for name, before in (("new", "old"), ("third", "new"), ("fourth", "third")):
        wanted = memory.has(name)
        assert wanted is not None
        memory.write(wanted, THREADS)
        assert memory.unlike(wanted, THREADS) == []
        load(memory, {"new": "third", "third": "fourth", "fourth": "fifth"}[name], limit=2)
        assert memory.arenas == 2
        back = memory.has(before)
        assert back is not None
        assert len(memory.versions) == 3
    assert back is not None
    memory.write(back, THREADS)
    assert version("third", state.memory) == back
    assert memory.has("fourth") is not None
    memory.drop_arenas()
    assert [found.content_digest for found in memory.versions] == ["third"]


def test_what_is_loaded_again_is_believed_of_the_new_load_alone(memory: ExchangedMemory) -> None:
    load(memory, "other", limit=2)
    damaged = memory.has("new")
    assert load(memory, "new", limit=2) == 0, "not beside the first one"
    good = memory.has("new")
    assert good != damaged
    # Also where it lies in an arena that another one was meant for.
    memory.set_version(1, damaged)
    assert [found for found in memory.versions if found.content_digest == "new"] == [damaged]


def test_a_proof_ends_with_what_was_proved(memory: ExchangedMemory) -> None:
    old, new = memory.in_model, memory.has("new")
    assert old is not None
    assert new is not None
    memory.unlike(old, THREADS)
    memory.write(new, THREADS)
    memory.unlike(new, THREADS)
    assert memory.has_proved("old")
    memory.drop_arenas()
    load(memory, "old")
    assert memory.has("old") != old
    assert not memory.has_proved("old")
    assert memory.has_proved("new")


def test_what_is_unknown_is_filled_first(memory: ExchangedMemory) -> None:
    load(memory, "other", limit=2)
    memory.set_version(1, None)
    assert memory.replaceable(2) == 1
    assert memory.replaceable(1) == 1


def test_a_foreign_write_is_found_and_named(memory: ExchangedMemory, state: ModelState) -> None:
    old = memory.in_model
    assert old is not None
    state.memory[state.form.tensors["bias"].span][0] ^= 1
    assert memory.unlike(old) == ["bias"]
    assert memory.in_model is None


def test_what_was_only_loaded_counts_as_unproved(memory: ExchangedMemory) -> None:
    new = memory.has("new")
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


class Helped(torch.nn.Module):
    """Has a number in a helper object, as vLLM's quantised layers have scales."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self.helper = SimpleNamespace(scale=1.0)


def test_a_helper_object_that_was_replaced_is_found() -> None:
    model = Helped()
    state = state_of(model, {"weight"})
    assert list(state.numbers) == ["helper.scale"]
    memory = ExchangedMemory(state, OPS, THREADS)
    memory.check_unmoved(state_of(model, {"weight"}))
    # The same path and the same number: kernels read it from the new one.
    model.helper = SimpleNamespace(scale=1.0)
    with pytest.raises(ParameterChangedError, match="restart vLLM"):
        memory.check_unmoved(state_of(model, {"weight"}))


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


class Scaled(torch.nn.Module):
    """Has scales of a cache in a tensor and as a number, as vLLM's attention has them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8), requires_grad=False)
        self._k_scale: torch.Tensor
        self.register_buffer("_k_scale", torch.tensor(1.0))
        self._k_scale_float = 1.0
        self.limits = {"largest": 7.0}


def scaled(model: Scaled) -> tuple[ExchangedMemory, LoadedVersion, LoadedVersion]:
    """Return what is exchanged of a model, what is live, and what is loaded beside it."""
    state = state_of(model, {"weight", "_k_scale"})
    memory = ExchangedMemory(state, OPS, THREADS)
    rows = row_digests(OPS, rows_of(state.memory), THREADS)
    memory.in_model = old = LoadedVersion("old", tuple(rows), state.numbers)
    arena = [piece.clone() for piece in state.memory]
    arena[state.form.tensors["_k_scale"].span].view(torch.float32).fill_(0.02)
    index = memory.replaceable(1)
    memory.put_arena(index, arena)
    digests = tuple(row_digests(OPS, rows_of(arena), THREADS))
    new = LoadedVersion("new", digests, {"_k_scale_float": (0.02).hex()})
    memory.set_version(index, new)
    return memory, old, new


def test_numbers_go_with_the_bytes_and_come_back_with_them() -> None:
    model = Scaled()
    memory, old, new = scaled(model)
    assert old.numbers == {"_k_scale_float": (1.0).hex()}
    memory.write(new, THREADS)
    assert (model._k_scale_float, model._k_scale.item()) == (0.02, torch.tensor(0.02).item())
    assert memory.unlike(new, THREADS) == []
    memory.write(old, THREADS)
    assert (model._k_scale_float, model._k_scale.item()) == (1.0, 1.0)
    assert memory.unlike(old, THREADS) == []
    # What an exchange has left behind that broke off before the numbers.
    memory.write(new, THREADS)
    model._k_scale_float = 1.0
    assert memory.unlike(new, THREADS) == ["_k_scale_float"]
    assert memory.in_model is None
    memory.write(new, THREADS)
    assert memory.unlike(new, THREADS) == []


def test_other_scales_read_a_cache_otherwise() -> None:
    memory, old, new = scaled(Scaled())
    assert memory.reads_cache_otherwise(new)
    assert not memory.reads_cache_otherwise(old)
    number = LoadedVersion("number", old.digests, new.numbers)
    assert memory.reads_cache_otherwise(number)
    tensor = LoadedVersion("tensor", new.digests, old.numbers)
    assert memory.reads_cache_otherwise(tensor)
    # Other weights alone: keys are old then, and are what they were.
    rows = [
        mine if memory.form.tensors["_k_scale"].span == span else b"another"
        for span, mine in zip(memory._spans, old.digests, strict=True)
    ]
    assert not memory.reads_cache_otherwise(LoadedVersion("w", tuple(rows), old.numbers))
