"""A rank on a CUDA device reads gigabytes while they come in, and proves them there."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.shm.incoming_version import ArrivalWriter

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from tests.support.staging import Version

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

_COUNT, _ROWS, _WIDTH = 6, 8192, 8192


class _Model(torch.nn.Module):
    """Layers of 128 MiB and a small bias each."""

    def __init__(self) -> None:
        super().__init__()
        for index in range(_COUNT):
            for name, shape in ((f"w{index}", (_ROWS, _WIDTH)), (f"b{index}", (_WIDTH,))):
                tensor = torch.zeros(shape, dtype=torch.bfloat16)
                self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.get_parameter(name).data.copy_(tensor)
            loaded.add(name)
        return loaded


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    stage = Staging(tmp_path / "segments.sock")
    yield stage
    stage.close()


@pytest.fixture
def worker(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> Worker:
    monkeypatch.setenv("WEIGHTSYNC_DEVICE_ROOM", "4GiB")
    model = _Model()
    model.load_weights(_tensors(1).items())
    found = Worker(model.cuda(), staging)
    found.device = torch.device("cuda", 0)
    found.adopt(_staged(staging, 1))
    return found


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for name, parameter in _Model().named_parameters():
        words = torch.randint(-9999, 9999, parameter.shape, generator=generator, dtype=torch.int16)
        made[name] = words.view(torch.bfloat16)
    return made


def _staged(staging: Staging, seed: int) -> Version:
    tensors = _tensors(seed)
    names = [(f"w{index}", f"b{index}") for index in range(_COUNT)]
    return staging.stage_files([save({n: tensors[n] for n in pair}) for pair in names])


def _read_ahead(worker: Worker, version: Version, shards: Iterable[int], *, end: bool) -> Any:
    staged = version.staged
    writer = ArrivalWriter(staged.manifest.layout, staged.segments)
    worker.staging.publish(writer.segment)
    page, (reader,) = worker.staging.pages(["0/0/0"])
    document = writer.segment.id
    reply = worker.call("ahead", apply_id="early", document=document, page=page)
    assert reply["ok"], reply
    for shard in shards:
        time.sleep(0.01)
        writer.mark(shard)
    if end:
        writer.end()
        deadline = time.monotonic() + 20
        while (reader.read() or {"phase": "running"})["phase"] == "running":
            assert time.monotonic() < deadline
            time.sleep(0.001)
    return reader


@pytest.mark.parametrize("end", [True, False], ids=["complete", "interrupted"])
def test_what_was_read_ahead_is_exact_and_proved(
    worker: Worker, staging: Staging, end: bool
) -> None:
    second = _staged(staging, 2)
    size = second.staged.manifest.layout.size
    _read_ahead(worker, second, (3, 0, 5, 1, 2, 4), end=end)
    report = worker.job("prepare", "two", second, base="base", ahead="early")
    assert (report["phase"], report["unlike"]) == ("ready", [])
    assert report["shards"] == list(range(_COUNT))
    assert report["h2d_bytes"] < size * (1 if end else 2)
    reply = worker.call("commit", apply_id="two")
    assert reply["content_digest"] == second.content_digest
    assert worker.job("verify", "two")["proved"] is True
    for name, tensor in _tensors(2).items():
        live = worker.model.get_parameter(name).data.view(torch.int16)
        assert torch.equal(live.cpu(), tensor.view(torch.int16)), name


def test_what_changed_under_it_is_named(worker: Worker, staging: Staging) -> None:
    second = _staged(staging, 2)
    second.tensor_bytes("w3")[-1] ^= 1
    _read_ahead(worker, second, range(_COUNT), end=True)
    second.tensor_bytes("w3")[-1] ^= 1
    # What lies in shared memory is right again; what was read is not.
    report = worker.job("prepare", "two", second, base="base", ahead="early")
    assert (report["unlike"], 3 in report["shards"]) == (["w3"], False)


def test_a_flipped_bit_of_what_is_live_is_named(worker: Worker, staging: Staging) -> None:
    second = _staged(staging, 2)
    worker.job("prepare", "two", second, base="base")
    assert worker.call("commit", apply_id="two")["ok"]
    worker.model.get_parameter("w5").data.view(torch.int16)[-1, -1] ^= 1
    report = worker.job("verify", "two")
    assert (report["proved"], report["mismatched"]) == (False, ["w5"])
