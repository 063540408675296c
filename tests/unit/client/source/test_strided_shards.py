"""DTensors whose local elements do not lie in a row, as PyTorch shards them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightsync_client.errors import InvalidError
from weightsync_client.source.sharded_tensors import box_source
from weightsync_client.source.tensors import Scratch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed.tensor import Placement


def local_part(
    full: torch.Tensor, placements: Sequence[Placement], sizes: Sequence[int], place: Sequence[int]
) -> torch.Tensor:
    for placement, count, at in zip(placements, sizes, place, strict=True):
        if isinstance(placement, (Shard, _StridedShard)):
            parts, _ = placement._split_tensor(full, count, with_padding=False, contiguous=True)
            full = parts[at]
    return full


@pytest.mark.parametrize(
    ("sizes", "placements", "boxes"),
    [
        ((4,), [_StridedShard(0, split_factor=2)], 2),
        ((4,), [_StridedShard(1, split_factor=2)], 2),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(0)], 1),
        ((2, 2), [_StridedShard(0, split_factor=2), Shard(1)], 2),
        ((2, 2), [_StridedShard(0, split_factor=2), Replicate()], 2),
    ],
    ids=str,
)
@pytest.mark.parametrize("shape", [(16, 8), (13, 9)], ids=str)
def test_each_element_of_a_strided_tensor_comes_once_with_its_value(
    sizes: tuple[int, ...], placements: list[Placement], boxes: int, shape: tuple[int, int]
) -> None:
    full = torch.arange(shape[0] * shape[1], dtype=torch.float32).reshape(shape)
    made, times = torch.zeros(shape), torch.zeros(shape)
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = init_device_mesh("cpu", sizes)
            part = local_part(full, placements, sizes, mesh.get_coordinate() or ())
            value = DTensor.from_local(
                part, mesh, placements, shape=full.shape, stride=full.stride()
            )
            source = box_source("w", value, rank)
        finally:
            dist.destroy_process_group()
        if shape == (16, 8):
            assert len(source.boxes) == boxes
        for box, tensor in source.boxes:
            data = bytes(memoryview(tensor.reader(Scratch())(0, tensor.size)).cast("B"))
            values = torch.frombuffer(bytearray(data), dtype=torch.float32).reshape(box.sizes)
            where = tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))
            made[where] = values
            times[where] += not source.replica
    assert torch.equal(made, full)
    assert torch.equal(times, torch.ones(shape))


def test_a_local_tensor_that_is_no_part_of_the_whole_is_refused() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        mesh, placements = init_device_mesh("cpu", (4,)), [_StridedShard(0, split_factor=2)]
        value = DTensor.from_local(
            torch.zeros(5, 8), mesh, placements, shape=torch.Size((16, 8)), stride=(8, 1)
        )
        with pytest.raises(InvalidError, match=r"local shape \[5, 8\].*full_tensor"):
            box_source("w", value, 0)
    finally:
        dist.destroy_process_group()
