"""A rank reads a version while it comes in; what it has read is used, and only for that version."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.host_kernels import HostKernels
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker, adopted, give_device
from weightsync import failpoints
from weightsync.gpu.device_kernels import Kernels
from weightsync.model.tensor_bits import as_ints
from weightsync.shm.incoming_version import ArrivalWriter
from weightsync.vllm.cuda import device_patch
from weightsync.vllm.cuda.uploader import Uploader
from weightsync.vllm.env import Amount
from weightsync.vllm.worker import plan_transform

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.staging import Staging, Version

#: q and k are fused and lie in two shards.
_FILES = (("down", "q", "q_bias"), ("scale",), ("head", "k"), ("embed", "k_bias"))
_ROOM = Amount(1 << 20)


class _Coming:
    """A version whose shards come when the test says so.

    Args:
        staging: Where it is published.
        version: All of it.
    """

    def __init__(self, staging: Staging, version: Version) -> None:
        self.version = version
        staged = version.staged
        self.writer = ArrivalWriter(staged.manifest.layout, staged.segments)
        staging.publish(self.writer.segment)
        # What did not come yet holds something else.
        self._bytes = [bytes(segment.view) for segment in version.segments]
        for index in range(len(version.segments)):
            self.spoil(index)

    def spoil(self, shard: int) -> None:
        size = len(self._bytes[shard])
        self.version.segments[shard].view[:size] = b"\xee" * size

    def come(self, *shards: int) -> None:
        for shard in shards:
            data = self._bytes[shard]
            self.version.segments[shard].view[: len(data)] = data
            self.writer.mark(shard)


@pytest.fixture(params=["own", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks use kernels of ours, or PyTorch's."""
    own = request.param == "own"
    monkeypatch.setattr(Kernels, "find", lambda _: HostKernels() if own else None)


@pytest.fixture
def make(
    staging: Staging, monkeypatch: pytest.MonkeyPatch, sent: list[int]
) -> Callable[..., Worker]:
    """Return a maker of ranks that hold the first toy checkpoint."""

    def made(amount: Amount | None = _ROOM, *, rank: int = 0, dtype: Any = torch.float32) -> Worker:
        give_device(monkeypatch, amount)
        found = adopted(staging, _files(1), rank=rank, dtype=dtype)
        # To warm up.
        sent.clear()
        return found

    monkeypatch.setattr(device_patch, "_WORTH", 1)
    return made


@pytest.fixture
def coming(staging: Staging) -> Callable[[int], _Coming]:
    return lambda seed: _Coming(staging, staging.stage_files(_files(seed)))


def _files(seed: int) -> list[bytes]:
    tensors = toy_tensors(seed)
    return [save({name: tensors[name] for name in names}) for names in _FILES]


def _begin(worker: Worker, coming: _Coming, name: str = "early") -> None:
    page, _ = worker.staging.pages([f"0/0/{worker.rank}"])
    document = coming.writer.segment.id
    reply = worker.call("ahead", apply_id=name, document=document, page=page)
    assert reply["ok"], reply


def _at_work(worker: Worker) -> bool:
    running: bool = worker._weightsync_rank._background.job.running()  # type: ignore[attr-defined]
    return running


def _until(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _read(worker: Worker, coming: _Coming, *shards: int, name: str = "early") -> None:
    """Have shards read ahead, and wait until the rank is done with them."""
    _begin(worker, coming, name)
    coming.come(*shards)
    coming.writer.end()
    _until(lambda: not _at_work(worker))


def _size(worker: Worker, coming: _Coming, sent: list[int]) -> int:
    """Return how many bytes are sent to the device for a version."""
    size: int = worker.job("prepare", "size", coming.version, base="base")["h2d_bytes"]
    worker.call("release", keep=["base"])
    sent.clear()
    return size


def _holds(worker: Worker, seed: int, dtype: Any = torch.float32) -> bool:
    wanted = load_for_real(ToyModel(rank=worker.rank, dtype=dtype), toy_tensors(seed))
    return all(
        torch.equal(as_ints(worker.model.get_parameter(name)), as_ints(parameter))
        for name, parameter in wanted.named_parameters()
    )


def _go_live(worker: Worker, coming: _Coming, seed: int, *, ahead: str = "early") -> None:
    """Prepare a version with what was read ahead, and commit it."""
    name = {2: "two", 3: "three"}[seed]
    report = worker.job("prepare", name, coming.version, base="base", ahead=ahead)
    assert report["phase"] == "ready"
    assert worker.call("commit", apply_id=name)["ok"]
    assert _holds(worker, seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
def test_what_was_read_ahead_is_not_read_again(
    make: Callable[..., Worker],
    coming: Callable[[int], _Coming],
    sent: list[int],
    rank: int,
    dtype: Any,
) -> None:
    worker = make(rank=rank, dtype=dtype)
    second = coming(2)
    size = _size(worker, second, sent)
    _read(worker, second, 2, 0, 3, 1)
    whole = list(sent)
    assert len(whole) == 8
    # Whatever lies there now: it is not read.
    for shard in range(len(_FILES)):
        second.spoil(shard)
    report = worker.job("prepare", "two", second.version, base="base", ahead="early")
    assert sent == whole
    assert (report["phase"], report["h2d_bytes"]) == ("ready", size)
    reply = worker.call("commit", apply_id="two")
    assert reply["content_digest"] == second.version.content_digest
    assert _holds(worker, 2, dtype)
    # What the server received is compared with it afterwards, and differs.
    assert worker.job("verify", "two")["proved"] is False


def test_what_is_made_of_two_shards_waits_for_both_and_the_rest_is_read_later(
    make: Callable[..., Worker], coming: Callable[[int], _Coming], sent: list[int]
) -> None:
    worker = make()
    second = coming(2)
    size = _size(worker, second, sent)
    # Of the shard with q only down and nothing that is fused with what lies elsewhere.
    _read(worker, second, 0)
    assert sent == [4 * 3 * 4]
    second.come(1, 2, 3)
    report = worker.job("prepare", "two", second.version, base="base", ahead="early")
    assert len(sent) == 8
    assert report["h2d_bytes"] == size
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, 2)


@pytest.mark.parametrize("ahead", ["", "other"])
def test_what_was_read_ahead_of_another_version_is_not_used(
    make: Callable[..., Worker], coming: Callable[[int], _Coming], ahead: str
) -> None:
    worker = make()
    second = coming(2)
    _read(worker, second, 0, 1, 2, 3)
    third = toy_tensors(3)
    for segment, names in zip(second.version.segments, _FILES, strict=True):
        data = save({name: third[name] for name in names})
        segment.view[: len(data)] = data
    _go_live(worker, second, 3, ahead=ahead)


def test_the_same_name_for_other_segments_is_not_believed(
    make: Callable[..., Worker], coming: Callable[[int], _Coming]
) -> None:
    worker = make()
    _read(worker, coming(2), 0, 1, 2, 3)
    third = coming(3)
    third.come(0, 1, 2, 3)
    _go_live(worker, third, 3)


def test_it_is_used_once(
    make: Callable[..., Worker], coming: Callable[[int], _Coming], sent: list[int]
) -> None:
    worker = make()
    second, third = coming(2), coming(3)
    _read(worker, second, 0, 1, 2, 3)
    third.come(0, 1, 2, 3)
    # Takes the same memory.
    worker.job("prepare", "three", third.version, base="base")
    sent.clear()
    worker.job("prepare", "two", second.version, base="base", ahead="early")
    assert len(sent) == 8
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, 2)


def test_a_prepare_ends_it_and_takes_what_there_is(
    make: Callable[..., Worker],
    coming: Callable[[int], _Coming],
    sent: list[int],
) -> None:
    worker = make()
    second = coming(2)
    _begin(worker, second)
    second.come(0, 1)
    _until(lambda: len(sent) == 2)
    # Not ended: more may come at any time.
    second.come(2, 3)
    _go_live(worker, second, 2)
    assert worker.job("verify", "two")["proved"] is True


def test_a_piece_that_is_under_way_counts_for_nothing(
    make: Callable[..., Worker],
    coming: Callable[[int], _Coming],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make()
    second = coming(2)
    begun, go_on = threading.Event(), threading.Event()
    send_all = Uploader.send_all

    def held(self: Uploader, target: torch.Tensor, source: torch.Tensor, *more: Any) -> None:
        if not begun.is_set():
            target.fill_(7)
            begun.set()
            go_on.wait(20)
        send_all(self, target, source, *more)

    monkeypatch.setattr(Uploader, "send_all", held)
    _begin(worker, second)
    second.come(0, 1, 2, 3)
    assert begun.wait(20)
    page, (reader,) = worker.staging.pages(["0/0/0"])
    document = second.version.document.id
    args = {"apply_id": "two", "document": document, "page": page, "base": "base"}
    assert worker.call("prepare", ahead="early", **args)["ok"]
    go_on.set()
    _until(lambda: (reader.read() or {"phase": "running"})["phase"] != "running")
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, 2)


def test_a_commit_ends_it_first(
    make: Callable[..., Worker], coming: Callable[[int], _Coming]
) -> None:
    worker = make()
    second, third = coming(2), coming(3)
    second.come(0, 1, 2, 3)
    worker.job("prepare", "two", second.version, base="base")
    _begin(worker, third)
    third.come(0, 1)
    _until(lambda: _at_work(worker))
    # Staging memory is the third's by now: it is written from where the server received it.
    assert worker.call("commit", apply_id="two")["ok"]
    assert not _at_work(worker)
    assert _holds(worker, 2)


@pytest.mark.parametrize("amount", [None, Amount(0)], ids=["host", "none"])
def test_without_a_device_or_room_nothing_is_read(
    make: Callable[..., Worker],
    coming: Callable[[int], _Coming],
    sent: list[int],
    amount: Amount | None,
) -> None:
    worker = make(amount)
    second = coming(2)
    _read(worker, second, 0, 1, 2, 3)
    assert sent == []
    _go_live(worker, second, 2)


def test_a_layout_that_has_no_plan_is_read_when_it_is_complete(
    make: Callable[..., Worker], staging: Staging, sent: list[int]
) -> None:
    worker = make()
    tensors = {name: tensor.double() for name, tensor in toy_tensors(2).items()}
    version = staging.stage_files([save(tensors)])
    writer = ArrivalWriter(version.staged.manifest.layout, version.staged.segments)
    staging.publish(writer.segment)
    page, (reader,) = staging.pages(["0/0/0"])
    reply = worker.call("ahead", apply_id="early", document=writer.segment.id, page=page)
    assert reply["ok"]
    _until(lambda: (reader.read() or {"phase": "running"})["phase"] == "ready")
    assert sent == []


def test_a_release_ends_it_and_its_segments_can_go(
    make: Callable[..., Worker], coming: Callable[[int], _Coming]
) -> None:
    worker = make()
    second = coming(2)
    _begin(worker, second)
    second.come(0)
    worker.call("release", keep=["base", "early"])
    assert _at_work(worker)
    worker.call("release", keep=["base"])
    _until(lambda: not _at_work(worker))
    base = worker.staging.versions[0].staged.segments
    _until(
        lambda: worker.call("release", keep=["base"], segments=list(base))["mapped"] == sorted(base)
    )


def test_a_trainer_that_stops_is_not_waited_for(
    make: Callable[..., Worker],
    coming: Callable[[int], _Coming],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan_transform, "_PATIENCE_S", 0.05)
    worker = make()
    second = coming(2)
    _begin(worker, second)
    second.come(0)
    _until(lambda: not _at_work(worker))
    second.come(1, 2, 3)
    _go_live(worker, second, 2)


def test_a_fault_costs_nothing_but_the_time(
    make: Callable[..., Worker],
    coming: Callable[[int], _Coming],
    sent: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan("worker.ahead=1*error(EIO)"))
    worker = make()
    second = coming(2)
    _read(worker, second, 0, 1, 2, 3)
    assert sent == []
    report = worker.job("prepare", "two", second.version, base="base", ahead="early")
    assert (report["phase"], len(sent)) == ("ready", 8)
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, 2)


def test_nobody_waits_for_it_to_end(
    make: Callable[..., Worker], coming: Callable[[int], _Coming]
) -> None:
    worker = make()
    old = worker.staging.stage_files(_files(4))
    worker.job("prepare", "old", old, base="base")
    worker.call("release", keep=["base"])
    second = coming(2)
    _begin(worker, second)
    second.come(0)
    _until(lambda: worker.call("state")["segments"] == 3 * len(_FILES))
    # Neither vLLM's sleep, which waits for whoever works on live parameters...
    assert worker.call("state")["busy"] == ""
    # ... nor what is gone for the server: but what it reads itself stays.
    base = worker.staging.versions[0].staged.segments
    told = worker.call("release", keep=["base", "early"], segments=list(base))
    assert told["busy"] == ""
    mine = second.version.staged.segments
    _until(
        lambda: (
            set(worker.call("release", keep=["base", "early"], segments=list(base))["mapped"])
            == {*base, *mine}
        )
    )
    assert _at_work(worker)
    second.come(1, 2, 3)
    second.writer.end()
    _until(lambda: not _at_work(worker))


def test_it_goes_on_where_it_was_under_the_same_name(
    make: Callable[..., Worker], coming: Callable[[int], _Coming], sent: list[int]
) -> None:
    worker = make()
    second = coming(2)
    _begin(worker, second)
    second.come(0, 1)
    _until(lambda: len(sent) == 2)
    worker.job("verify", "base")
    _begin(worker, second)
    second.come(2, 3)
    second.writer.end()
    _until(lambda: not _at_work(worker))
    assert len(sent) == 8
    # Under another one it does not.
    _begin(worker, second, "another")
    _until(lambda: not _at_work(worker))
    assert len(sent) == 16


def test_a_push_that_is_over_before_is_nothing_to_tell_of(
    make: Callable[..., Worker], caplog: pytest.LogCaptureFixture
) -> None:
    worker = make()
    page, (reader,) = worker.staging.pages(["0/0/0"])
    reply = worker.call("ahead", apply_id="early", document="gone", page=page)
    assert reply["ok"]
    _until(lambda: (reader.read() or {"phase": "running"})["phase"] == "ready")
    assert caplog.text == ""
