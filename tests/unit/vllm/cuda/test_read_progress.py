"""What a rank tells of how far it has read: never of bytes that it, or its device, reads later."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker, adopted, give_device
from weightsync.model.tensor_bits import as_ints
from weightsync.shm.status_page import PageWriter
from weightsync.vllm.cuda import cuda_ops as device_
from weightsync.vllm.cuda import device_patch, uploader
from weightsync.vllm.cuda.uploader import StreamThrottle, Uploader
from weightsync.vllm.env import Amount

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.staging import Staging, Version

Tensors = dict[str, torch.Tensor]

#: What is fused lies in two shards, and the ranks read them in another order.
_FILES = (("down", "q", "q_bias"), ("scale",), ("head", "k"), ("embed", "k_bias"))
_ROOM = Amount(1 << 20)


class _Late(StreamThrottle):
    """A device that copies nothing before it is waited for."""

    queued: ClassVar[list[Callable[[], None]]] = []

    def drain(self) -> None:
        super().drain()
        for copy in self.queued:
            copy()
        self.queued.clear()


def _files(tensors: Tensors) -> list[bytes]:
    return [save({name: tensors[name] for name in names}) for names in _FILES]


def _nudged() -> Tensors:
    made = {name: tensor.clone() for name, tensor in toy_tensors(1).items()}
    for name in ("q", "k_bias"):
        as_ints(made[name]).reshape(-1)[0] ^= 1 << 20
    return made


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """All that ranks write on their pages."""
    pages: list[dict[str, Any]] = []
    write = PageWriter.write

    def noted(self: PageWriter, report: dict[str, Any]) -> None:
        pages.append(report)
        write(self, report)

    monkeypatch.setattr(PageWriter, "write", noted)
    return pages


@pytest.fixture
def make(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, told: list[dict[str, Any]]
) -> Callable[..., Worker]:
    """Return a maker of ranks that hold the first toy checkpoint, and tell as often as they can."""

    def made(amount: Amount | None = _ROOM, *, rank: int = 0, dtype: Any = torch.float32) -> Worker:
        give_device(monkeypatch, amount)
        found = adopted(staging, _files(toy_tensors(1)), rank=rank, dtype=dtype)
        told.clear()
        return found

    monkeypatch.setattr(uploader, "_STEP", 0)
    monkeypatch.setattr(device_patch, "_WORTH", 1)
    return made


def _read(told: list[dict[str, Any]]) -> list[int]:
    return [report["read"] for report in told if report["phase"] == "running"]


def _spoil(version: Version, shard: int) -> None:
    entry = version.staged.manifest.layout.shards[shard]
    view = version.segments[shard].view
    view[entry.data_start : entry.size] = b"\xee" * (entry.size - entry.data_start)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("patched", [False, True])
def test_what_was_told_as_read_is_never_read_again(
    make: Callable[..., Worker],
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
    patched: bool,
    rank: int,
    dtype: Any,
) -> None:
    worker = make(rank=rank, dtype=dtype)
    tensors = _nudged() if patched else toy_tensors(2)
    version = staging.stage_files(_files(tensors))
    send, write, seen = Uploader.send, PageWriter.write, []

    def later(self: Uploader, target: torch.Tensor, source: torch.Tensor) -> None:
        _Late.queued.append(lambda: send(self, target, source))

    def spoiling(self: PageWriter, report: dict[str, Any]) -> None:
        if report["phase"] == "running":
            seen.append(report["read"])
            for shard in version.staged.manifest.layout.largest_first[: report["read"]]:
                _spoil(version, shard)
        write(self, report)

    monkeypatch.setattr(device_, "StreamThrottle", _Late)
    monkeypatch.setattr(Uploader, "send", later)
    monkeypatch.setattr(PageWriter, "write", spoiling)
    report = worker.job("prepare", "two", version, base="base")
    assert (report["phase"], report["patched"]) == ("ready", patched)
    assert seen == [0, 1, 2, 3, 4]
    assert worker.call("commit", apply_id="two")["content_digest"] == version.content_digest
    wanted = load_for_real(ToyModel(rank=rank, dtype=dtype), tensors)
    for name, parameter in wanted.named_parameters():
        held = worker.model.get_parameter(name)
        assert torch.equal(as_ints(held), as_ints(parameter)), name


@pytest.mark.parametrize(
    ("amount", "more"),
    [
        (_ROOM, {"base": "base", "compare_live": True}),
        (_ROOM, {}),
        (Amount(0), {"base": "base"}),
        (Amount(1), {"base": "base"}),
        (None, {"base": "base"}),
    ],
    ids=["compared", "not staged", "no room", "found on the host", "no device"],
)
def test_nothing_is_told_where_the_host_reads(
    make: Callable[..., Worker],
    staging: Staging,
    told: list[dict[str, Any]],
    amount: Amount | None,
    more: dict[str, Any],
) -> None:
    worker = make(amount)
    version = staging.stage_files(_files(_nudged()))
    assert worker.job("prepare", "two", version, **more)["phase"] == "ready"
    assert _read(told) == [0]


def test_little_is_not_worth_a_word(
    make: Callable[..., Worker],
    staging: Staging,
    told: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make()
    monkeypatch.setattr(uploader, "_STEP", 100)
    worker.job("prepare", "two", staging.stage_files(_files(toy_tensors(2))), base="base")
    # The second turn is too little to be told of by itself.
    assert _read(told) == [0, 1, 3, 4]
    told.clear()
    monkeypatch.setattr(uploader, "_STEP", 1 << 20)
    worker.job("prepare", "three", staging.stage_files(_files(toy_tensors(3))), base="base")
    assert _read(told) == [0, 4]


def test_thousands_of_shards_are_told_in_a_few_bytes(
    make: Callable[..., Worker], staging: Staging, told: list[dict[str, Any]]
) -> None:
    worker = make()
    files = [*_files(toy_tensors(2)), *[save({})] * 3000]
    report = worker.job("prepare", "two", staging.stage_files(files), base="base")
    assert report["phase"] == "ready", report
    assert _read(told) == [0, 1, 2, 3, 3004]


def test_who_is_stopped_has_not_read_all(
    make: Callable[..., Worker],
    staging: Staging,
    told: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make()
    send, version = Uploader.send, staging.stage_files(_files(toy_tensors(2)))
    calls: list[torch.Tensor] = []

    def stopping(self: Uploader, target: torch.Tensor, source: torch.Tensor) -> None:
        calls.append(source)
        if len(calls) == 6:
            worker.call("release", keep=["base"])
        send(self, target, source)

    monkeypatch.setattr(Uploader, "send", stopping)
    report = worker.job("prepare", "two", version, base="base")
    assert report["phase"] == "failed"
    assert report["error"].startswith("the server gave this version up")
    assert 4 not in _read(told)
