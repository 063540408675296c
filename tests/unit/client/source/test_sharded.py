"""What a process pushes of tensors that several hold, and how the processes find each other."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from weightsync.model.digest import tensor_digest
from weightsync.model.tensor_slices import Box, problem_of
from weightsync_client.errors import InvalidError
from weightsync_client.source.modules import module_tensors
from weightsync_client.source.sharded_tensors import ShardedTensor, box_source
from weightsync_client.source.slice_shards import SliceShard
from weightsync_client.source.source import Source, SourceWriter, make_source, source_writer
from weightsync_client.source.tensors import Scratch

RANKS = 4


@pytest.fixture(autouse=True)
def _no_group() -> Any:
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def as_rank(rank: int) -> None:
    """Make this process one rank of four, whose others are not there."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)


def dtensor(shape: tuple[int, ...], mesh: DeviceMesh, placements: list[Placement]) -> DTensor:
    """Return this rank's part of a tensor that counts its elements."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    whole = torch.arange(math.prod(shape), dtype=torch.float32).reshape(shape)
    sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    box = Box(tuple(offsets), tuple(sizes))
    part = whole[box.slices].contiguous()
    stride = whole.stride()
    return DTensor.from_local(
        part, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


@pytest.mark.parametrize("shape", [(8, 6), (5, 3), (1, 7), (3, 4, 5)])
@pytest.mark.parametrize(
    ("dims", "placements"),
    [
        ((4,), [Shard(0)]),
        ((4,), [Shard(1)]),
        ((2, 2), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(1)]),
        ((2, 2), [Shard(0), Shard(0)]),
        ((2, 2), [Replicate(), Replicate()]),
    ],
)
def test_the_boxes_of_all_ranks_are_the_tensor(
    shape: tuple[int, ...], dims: tuple[int, ...], placements: list[Placement]
) -> None:
    sent: list[Box] = []
    replicas: list[Box] = []
    for rank in range(RANKS):
        as_rank(rank)
        source = box_source("x", dtensor(shape, init_device_mesh("cpu", dims), placements), rank)
        assert (source.whole.shape, source.whole.dtype) == (shape, "F32")
        for box, tensor in source.boxes:
            (replicas if source.replica else sent).append(box)
            whole = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
            assert bytes(tensor.reader(Scratch())(0, tensor.size)) == whole[box.slices].tobytes()
    assert problem_of(shape, sent) == ""
    assert set(replicas) <= set(sent)


def test_what_tensor_parallel_leaves_alone_is_sent_once() -> None:
    senders = []
    for rank in range(RANKS):
        as_rank(rank)
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        source = box_source("norm", dtensor((6,), mesh["data"], [Shard(0)]), rank)
        if not source.replica:
            senders.append(rank)
    # Ranks 1 and 3 hold what 0 and 2 do, as the mesh of FSDP alone does not tell.
    assert senders == [0, 2]


def test_partial_sums_are_refused() -> None:
    as_rank(0)
    mesh = init_device_mesh("cpu", (4,))
    tensor = DTensor.from_local(torch.ones(2), mesh, [Partial()], run_check=False)
    with pytest.raises(InvalidError, match=r"holds partial sums .* redistribute"):
        box_source("x", tensor, 0)


def test_what_every_process_holds_is_sent_by_the_first() -> None:
    for writer in range(3):
        source = box_source("x", np.zeros((2, 3), np.float32), writer)
        assert source.replica == (writer > 0)
        assert [box for box, _ in source.boxes] == [Box((0, 0), (2, 3))]


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (ShardedTensor((4,), "F31"), "use one of"),
        (ShardedTensor((4,), "F32", [((0,), np.zeros(2, np.int32))]), "of its dtype"),
        (ShardedTensor((4, 2), "F32", [((0,), np.zeros(2, np.float32))]), "of its dtype"),
        (ShardedTensor((4, 2), "F32", [((0,), np.zeros((2, 2), np.float32))]), "of its dtype"),
    ],
)
def test_what_does_not_fit_is_refused(tensor: ShardedTensor, word: str) -> None:
    with pytest.raises(InvalidError, match=word):
        box_source("x", tensor, 0)


def made(writer: int) -> Source:
    source = {
        "b": ShardedTensor((4, 6), "F32", [((2 * writer, 0), np.full((2, 6), 7.0, np.float32))]),
        "a": np.arange(3, dtype=np.float32),
        "c": ShardedTensor((2,), "F32"),
    }
    return make_source(source, 1 << 20, writer=lambda: SourceWriter(2, writer, "k"))


def test_a_shard_is_the_boxes_that_are_sent() -> None:
    for writer in range(2):
        source = made(writer)
        (shard,) = source.shards
        assert isinstance(shard, SliceShard)
        assert source.layout is not None
        assert source.layout.shards == (shard.whole.entry,)
        names = [tensor.name for tensor in shard.whole.tensors]
        assert {names[local.tensor] for local in shard.sent} == (
            {"a", "b"} if not writer else {"b"}
        )
        assert {names[local.tensor] for local in shard.replicas} == (set() if not writer else {"a"})
        data = b"".join(bytes(part) for part in shard.open(Scratch()).read(0, shard.entry.size))
        assert source.size == len(data) == sum(local.bytes.size for local in shard.sent)
        digests = [tensor_digest(np.arange(3, dtype=np.float32).tobytes())]
        assert shard.all_digests([]) == (digests if writer else [])


def test_one_process_that_holds_all_pushes_as_ever() -> None:
    def alone() -> SourceWriter:
        return SourceWriter(1, 0, "")

    whole = ShardedTensor((2, 2), "F32", [((0, 0), np.ones((2, 2), np.float32))])
    source = make_source({"x": whole}, 1 << 20, writer=alone)
    assert source.writer is None
    assert [tensor.name for tensor in source.tensors] == ["x"]
    part = ShardedTensor((4, 2), "F32", [((0, 0), np.ones((2, 2), np.float32))])
    with pytest.raises(InvalidError, match="held in part"):
        make_source({"x": part}, 1 << 20, writer=alone)


def test_the_ranks_of_a_job_and_a_step_have_one_key() -> None:
    as_rank(0)
    store = HashStore()
    keys = []
    for rank in range(2):
        torch.distributed.destroy_process_group()
        torch.distributed.init_process_group("fake", store=store, rank=rank, world_size=2)
        writer = source_writer({"step": 5})
        assert (writer.count, writer.number) == (2, rank)
        keys.append(writer.key)
        assert source_writer({"step": 6}).key != writer.key
    assert len(set(keys)) == 1


def test_each_start_of_a_job_has_keys_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    store = HashStore()
    torch.distributed.init_process_group("fake", store=store, rank=0, world_size=2)
    first = source_writer({"step": 5}).key
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert source_writer({"step": 5}).key != first


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({}, "writers=, writer= and idempotency_key="),
        ({"writers": 2}, "writers=, writer= and idempotency_key="),
        ({"writers": 2, "writer": 1}, "give step="),
        ({"writers": 2, "writer": 1, "step": 3}, "give step="),
        ({"writers": 2, "writer": 2, "idempotency_key": "k"}, "number them from 0"),
    ],
)
def test_what_nobody_says_is_asked_for(options: Any, word: str) -> None:
    with pytest.raises(InvalidError, match=word):
        source_writer(options)


def test_what_the_caller_says_comes_before_the_ranks() -> None:
    as_rank(3)
    writer = source_writer({"writers": 2, "writer": 1, "idempotency_key": "mine"})
    assert writer == SourceWriter(2, 1, "mine")


def test_whole_tensors_of_several_are_replicas() -> None:
    for number in range(2):
        source = make_source(
            {"x": np.ones(3, np.float32)},
            1 << 20,
            writer=lambda number=number: SourceWriter(2, number, "k"),  # type: ignore[misc]
            together=True,
        )
        (shard,) = source.shards
        assert isinstance(shard, SliceShard)
        assert (len(shard.sent), len(shard.replicas)) == ((1, 0) if not number else (0, 1))


def test_files_and_iterators_are_of_one(tmp_path: Path) -> None:
    seen = []

    def pairs() -> Iterator[tuple[str, Any]]:
        for name in "abc":
            seen.append(name)
            yield name, np.zeros(1)

    for source in (tmp_path, pairs()):
        with pytest.raises(InvalidError, match="from one process without these"):
            make_source(source, 1 << 20, together=True)
    assert seen == []
    with pytest.raises(InvalidError, match="from one process without these"):
        make_source(pairs(), 1 << 20, together=True, collective=True)
    # Other ranks take part in it.
    assert seen == ["a", "b", "c"]


def test_two_parameters_of_one_shape_are_not_tied_because_both_are_sharded() -> None:
    class Tied(transformers.PreTrainedModel):  # type: ignore[misc]
        config_class = transformers.PretrainedConfig

        def __init__(self) -> None:
            super().__init__(transformers.PretrainedConfig())
            self.embed = torch.nn.Embedding(8, 4)
            self.head = torch.nn.Linear(4, 8, bias=False)
            self.all_tied_weights_keys = {"head.weight": "embed.weight"}

    as_rank(3)
    model = Tied()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    assert module_tensors(model).keys() == {"embed.weight", "head.weight"}
    tied = Tied()
    tied.head.weight = tied.embed.weight
    fully_shard(tied, mesh=init_device_mesh("cpu", (RANKS,)))
    assert module_tensors(tied).keys() == {"embed.weight"}


def test_a_rank_that_pushes_alone_is_refused_at_once_what_it_has_in_part() -> None:
    as_rank(0)
    whole = {"x": dtensor((8, 2), init_device_mesh("cpu", (RANKS,)), [Shard(0)])}
    with pytest.raises(InvalidError, match="this is the only process that pushes"):
        make_source(whole, 1 << 20, writer=lambda: source_writer({"writers": 1}))
