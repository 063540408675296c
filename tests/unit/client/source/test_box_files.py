"""A distributed checkpoint is pushed as the whole tensors of its ranks, shown with PyTorch's own.

Four ranks save what FSDP2 leaves them, and what lies on a mesh of two dimensions.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.multiprocessing.spawn import spawn

from weightsync_client import InvalidError
from weightsync_client.source.source import make_source
from weightsync_client.source.tensors import Scratch

if TYPE_CHECKING:
    from pathlib import Path

# Each rank imports PyTorch anew, seconds of a processor that others may need as well.
pytestmark = pytest.mark.timeout(180)

RANKS = 4


def _whole() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    return {
        "linear.weight": torch.randn(10, 6, generator=chance),
        "linear.bias": torch.randn(10, generator=chance),
        "columns": torch.randn(3, 8, generator=chance).bfloat16(),
        "both": torch.randn(8, 6, generator=chance),
        "norm": torch.randn(5, generator=chance),
        "plain": torch.randn(2, 2, generator=chance),
        "scalar": torch.tensor(7, dtype=torch.int64),
    }


def _save(rank: int, folder: str) -> None:
    """Save what one rank holds."""
    whole = _whole()
    meet = f"file://{folder}/meet"
    torch.distributed.init_process_group("gloo", init_method=meet, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    linear = torch.nn.Linear(6, 10)
    linear.load_state_dict({"weight": whole["linear.weight"], "bias": whole["linear.bias"]})
    fully_shard(linear, mesh=init_device_mesh("cpu", (RANKS,)))
    state = {
        **{f"linear.{name}": tensor for name, tensor in linear.state_dict().items()},
        "columns": distribute_tensor(whole["columns"], mesh, [Replicate(), Shard(1)]),
        "both": distribute_tensor(whole["both"], mesh, [Shard(0), Shard(1)]),
        "norm": distribute_tensor(whole["norm"], mesh, [Replicate(), Replicate()]),
        "plain": whole["plain"],
        "scalar": whole["scalar"],
    }
    writer = HuggingFaceStorageWriter(f"{folder}/saved", save_distributed=True)
    save(state, storage_writer=writer)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    spawn(_save, (str(folder),), nprocs=RANKS)  # type: ignore[no-untyped-call]  # torch's
    return folder / "saved"


def _copy(saved: Path, to: Path, *, leave_out: str = "") -> Path:
    to.mkdir()
    for file in saved.glob("*.safetensors"):
        if file.name != leave_out:
            (to / file.name).write_bytes(file.read_bytes())
    return to


def test_the_whole_tensors_are_pushed(saved: Path) -> None:
    files = sorted(saved.glob("*.safetensors"))
    assert len(files) == RANKS
    assert all("linear.weight" in load_file(file) for file in files)
    source = make_source(saved, 1 << 20)
    expected = _whole()
    assert {tensor.name: tensor.shape for tensor in source.tensors} == {
        name: tuple(tensor.shape) for name, tensor in expected.items()
    }
    assert source.again
    for tensor in source.tensors:
        whole = expected[tensor.name].reshape(-1).view(torch.uint8).numpy().tobytes()
        assert bytes(tensor.reader(Scratch())(0, tensor.size)) == whole, tensor.name


def test_a_part_in_the_middle_is_read(saved: Path) -> None:
    (both,) = [tensor for tensor in make_source(saved, 1 << 20).tensors if tensor.name == "both"]
    read = both.reader(Scratch())
    whole = _whole()["both"].numpy()
    assert np.array_equal(np.frombuffer(read(24, 72), np.float32), whole.reshape(-1)[6:18])


def test_a_rank_that_is_missing_is_told(saved: Path, tmp_path: Path) -> None:
    some = sorted(saved.glob("*.safetensors"))[1]
    folder = _copy(saved, tmp_path / "some", leave_out=some.name)
    with pytest.raises(InvalidError, match=r"does not hold tensor .* whole: .* all ranks"):
        make_source(folder, 1 << 20)


def test_a_part_alone_is_not_pushed_as_a_tensor(saved: Path) -> None:
    last = max(saved.glob("*.safetensors"))
    with pytest.raises(InvalidError, match="holds parts of tensors; push the folder"):
        make_source(last, 1 << 20)


def test_two_saves_in_one_folder_are_told(saved: Path, tmp_path: Path) -> None:
    folder = _copy(saved, tmp_path / "two")
    first = min(folder.glob("*.safetensors"))
    (folder / "shard-00009-model-00001-of-00001.safetensors").write_bytes(first.read_bytes())
    with pytest.raises(InvalidError, match=r"overlap; give .* of one save alone"):
        make_source(folder, 1 << 20)


def _with_info(path: Path, info: object, **tensors: torch.Tensor) -> None:
    save_file(
        tensors, path, {"DCP_SHARDING_INFO": info if isinstance(info, str) else json.dumps(info)}
    )


@pytest.mark.parametrize(
    "info", ["{", [], {"a": {}}, {"a": {"saved_offsets": [-1]}}, {"a": {"saved_offsets": ["0"]}}]
)
def test_metadata_that_cannot_be_read_is_told(tmp_path: Path, info: object) -> None:
    _with_info(tmp_path / "a.safetensors", info, a=torch.zeros(2))
    with pytest.raises(InvalidError, match="cannot be read; save the checkpoint again"):
        make_source(tmp_path, 1 << 20)


def test_parts_that_do_not_fit_are_told(tmp_path: Path) -> None:
    begin, end = {"a": {"saved_offsets": [0]}}, {"a": {"saved_offsets": [2]}}
    _with_info(tmp_path / "a.safetensors", begin, a=torch.zeros(2))
    _with_info(tmp_path / "b.safetensors", end, a=torch.zeros(2, dtype=torch.float16))
    with pytest.raises(InvalidError, match=r"as F16 with 1 dimensions, a\.safetensors as F32"):
        make_source(tmp_path, 1 << 20)
    _with_info(tmp_path / "b.safetensors", {"a": {"saved_offsets": [2, 0]}}, a=torch.zeros(2))
    with pytest.raises(InvalidError, match="2 offsets of tensor 'a', which has 1 dimensions"):
        make_source(tmp_path, 1 << 20)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_save_of_whole_tensors_is_pushed_as_its_files(tmp_path: Path) -> None:
    state = {"a": torch.arange(4), "b": torch.zeros(2)}
    save(state, storage_writer=HuggingFaceStorageWriter(str(tmp_path)), no_dist=True)
    source = make_source(tmp_path, 1 << 20)
    assert [shard.entry.name for shard in source.shards] == ["model-00001-of-00001.safetensors"]
    assert {tensor.name for tensor in source.tensors} == {"a", "b"}
