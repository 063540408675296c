"""What a rank holds of flat parameters: boxes in its own memory, which together are the model."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.support.models import untrained
from weightsync.model.tensor_slices import problem_of
from weightsync_client.errors import InvalidError
from weightsync_client.source.modules import module_tensors
from weightsync_client.source.sharded_tensors import FlatRange, FlatRanges, ShardedTensor, boxes_of
from weightsync_client.source.source import SourceWriter, make_source

RANKS = 3
CPU = torch.device("cpu")

Held = dict[str, torch.Tensor | ShardedTensor]


@pytest.fixture(autouse=True)
def _no_group() -> Iterator[None]:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def as_rank(rank: int, count: int = RANKS) -> None:
    """Make this process one of several, whose others are not there: a collective does nothing."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=count)


def put_together(ranks: list[Held]) -> dict[str, torch.Tensor]:
    """Return whole tensors of what all ranks hold, each element of which one of them has."""
    whole: dict[str, torch.Tensor] = {}
    for name in ranks[0]:
        values = [rank[name] for rank in ranks]
        parts = [value for value in values if isinstance(value, ShardedTensor)]
        if not parts:
            whole[name] = next(value for value in values if isinstance(value, torch.Tensor))
            continue
        boxes = [box for part in parts if not part.replica for box in part.boxes]
        whole[name] = torch.full(parts[0].shape, math.nan)
        for offsets, local in boxes:
            sides = zip(offsets, local.shape, strict=True)
            target = whole[name][tuple(slice(at, at + size) for at, size in sides)]
            assert target.isnan().all()
            target.copy_(local)
    return whole


@pytest.mark.parametrize("shape", [(), (7,), (1, 5), (4, 3), (3, 2, 4), (2, 1, 3, 2), (0, 3)])
def test_a_range_is_a_few_boxes_in_its_order(shape: tuple[int, ...]) -> None:
    count = math.prod(shape)
    whole = torch.arange(count).reshape(shape)
    for begin, end in itertools.combinations(range(count + 1), 2):
        boxes = boxes_of(shape, begin, end)
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        found = torch.cat([whole[box.slices].reshape(-1) for box in boxes])
        assert found.tolist() == list(range(begin, end))
        rest = boxes_of(shape, 0, begin) + boxes_of(shape, end, count)
        assert problem_of(shape, boxes + rest) == ""


def test_a_part_of_a_tensor_is_found_and_one_in_another_order_refused() -> None:
    whole = torch.empty(4, 6, device="meta")
    data = torch.arange(5, 15)
    ranges = FlatRanges([FlatRange(whole, 5, data)])
    with ranges.views():
        left, right = (half.contiguous() for half in whole.chunk(2, dim=0))
        turned = whole.transpose(0, 1).contiguous()
    held = ranges.local_part("right", right)
    assert isinstance(held, ShardedTensor)
    assert (held.shape, held.dtype) == ((2, 6), "I64")
    assert [(at, local.tolist()) for at, local in held.boxes] == [((0, 0), [[12, 13, 14]])]
    assert ranges.local_part("left", left).boxes[0][0] == (0, 5)  # type: ignore[union-attr]  # as above
    for strange in (turned, torch.empty(2, device="meta")):
        with pytest.raises(InvalidError, match=r"'x' is not in the order .*fully_shard"):
            ranges.local_part("x", strange)


@pytest.mark.parametrize("original", [True, False])
@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_fsdp1_parts_of_a_model_of_transformers_are_what_it_saves(
    kind: str, *, original: bool
) -> None:
    expected = module_tensors(untrained(kind))
    ranks = []
    for rank in range(RANKS):
        as_rank(rank)
        model = untrained(kind)
        policy = ModuleWrapPolicy({type(model.model.layers[0])})
        wrapped = FullyShardedDataParallel(
            model, device_id=CPU, use_orig_params=original, auto_wrap_policy=policy
        )
        ranks.append(dict(module_tensors(wrapped)))
    found = put_together(ranks)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_nothing_is_copied() -> None:
    as_rank(1)
    model = FullyShardedDataParallel(torch.nn.Linear(8, 8), device_id=CPU)
    shard = next(iter(model.parameters()))
    own = shard.untyped_storage().data_ptr()
    held = list(module_tensors(model).values())
    boxes = [local for part in held for _, local in part.boxes]
    assert {local.untyped_storage().data_ptr() for local in boxes} == {own}
    # Without what fills it up.
    assert sum(local.numel() for local in boxes) == shard.numel() == 24


def _hybrid() -> FullyShardedDataParallel:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    strategy = ShardingStrategy.HYBRID_SHARD
    return FullyShardedDataParallel(
        torch.nn.Linear(3, 3), device_id=CPU, device_mesh=mesh, sharding_strategy=strategy
    )


def _not_sharded() -> FullyShardedDataParallel:
    strategy = ShardingStrategy.NO_SHARD
    return FullyShardedDataParallel(
        torch.nn.Linear(3, 3), device_id=CPU, sharding_strategy=strategy
    )


@pytest.mark.filterwarnings("ignore:The `NO_SHARD` sharding strategy is deprecated")
@pytest.mark.parametrize(
    ("make", "senders"), [(_hybrid, [0, 1]), (_not_sharded, [0])], ids=["hybrid", "not_sharded"]
)
def test_of_ranks_that_hold_the_same_the_lowest_sends(
    make: Callable[[], FullyShardedDataParallel], senders: list[int]
) -> None:
    ranks, sending = [], []
    for rank in range(4):
        as_rank(rank, 4)
        torch.manual_seed(0)
        held = dict(module_tensors(make()))
        ranks.append(held)
        if not held["weight"].replica:
            sending.append(rank)
    assert sending == senders
    torch.manual_seed(0)
    assert torch.equal(put_together(ranks)["weight"], torch.nn.Linear(3, 3).weight)


@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
def test_the_only_process_pushes_whole_tensors() -> None:
    as_rank(0, 1)
    model = FullyShardedDataParallel(torch.nn.Linear(3, 3), device_id=CPU)
    source = make_source(model, 1 << 20, writer=lambda: SourceWriter(1, 0, ""))
    assert [(t.name, t.shape) for t in source.tensors] == [("weight", (3, 3)), ("bias", (3,))]
    assert source.writer is None


def test_one_of_several_cannot_push_alone() -> None:
    as_rank(1)
    model = FullyShardedDataParallel(torch.nn.Linear(3, 3), device_id=CPU)
    with pytest.raises(InvalidError, match=r"'weight' is held in part.* give writers="):
        make_source(model, 1 << 20, writer=lambda: SourceWriter(1, 0, ""))


def test_elements_in_another_order_are_refused() -> None:
    as_rank(0)
    model = torch.nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's
    wrapped = FullyShardedDataParallel(model, device_id=CPU)
    with pytest.raises(InvalidError, match=r"'weight' has its elements in another order .* FSDP1"):
        module_tensors(wrapped)


@pytest.mark.parametrize(
    ("held", "word"),
    [
        ({"status": SimpleNamespace(name="NOT_AVAILABLE")}, "offloaded to a disk"),
        ({"status": SimpleNamespace(name="AVAILABLE"), "ds_quant_scale": 1}, "kept quantised"),
    ],
)
def test_what_zero3_has_elsewhere_is_refused(held: dict[str, Any], word: str) -> None:
    # A disk and a GPU's quantiser would be needed for the real ones.
    model = torch.nn.Linear(3, 3)
    weight: Any = model.weight
    weight.ds_id, weight.ds_tensor = 0, SimpleNamespace(**held)
    with pytest.raises(InvalidError, match=f"'weight' is {word} by ZeRO-3; .*GatheredParameters"):
        module_tensors(model)


def test_adapters_on_flat_parameters_are_refused() -> None:
    peft = pytest.importorskip("peft")
    as_rank(0)
    model = peft.get_peft_model(untrained("untied"), peft.LoraConfig(target_modules=["q_proj"]))
    wrapped = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    with pytest.raises(InvalidError, match="adapters on weights that FSDP1 or ZeRO-3 has sharded"):
        make_source(wrapped, 1 << 20)
