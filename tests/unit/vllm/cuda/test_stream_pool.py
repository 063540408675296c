"""Staging, commit and proof as on a device, with the host's memory in its place."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.host_kernels import HostKernels
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync import failpoints
from weightsync.gpu.device_find import KernelFinder, TorchFinder
from weightsync.gpu.device_kernels import Kernels
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.cuda import device_patch, staged_write
from weightsync.vllm.cuda.cuda_ops import _SCRATCH, CudaOps
from weightsync.vllm.env import Amount
from weightsync.vllm.worker import worker_methods as worker_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.staging import Staging, Version

Tensors = dict[str, torch.Tensor]

_ROOM, _NONE = Amount(1 << 20), Amount(0)


@pytest.fixture(autouse=True)
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a few elements of a toy model be few enough for a patch."""
    monkeypatch.setattr(device_patch, "_WORTH", 1)
    monkeypatch.setattr(device_patch, "_DENSE", 2)


@pytest.fixture(params=["own", "torch"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks use kernels of ours, or PyTorch's."""
    own = request.param == "own"
    monkeypatch.setattr(Kernels, "find", lambda _: HostKernels() if own else None)


@pytest.fixture
def make(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    """Return a maker of ranks that hold the first toy checkpoint."""

    def made(amount: Amount = _ROOM, *, rank: int = 0, dtype: Any = torch.float32) -> Worker:
        cpu = torch.device("cpu")
        monkeypatch.setattr(worker_, "_device_ops", lambda *_: CudaOps(cpu, amount, 1.0))
        found = Worker(load_for_real(ToyModel(rank=rank, dtype=dtype), toy_tensors(1)), staging)
        found.rank = rank
        found.adopt(staging.stage_files([save(toy_tensors(1))]))
        return found

    return made


@pytest.fixture
def stage(staging: Staging) -> Callable[[Tensors], Version]:
    return lambda tensors: staging.stage_files([save(tensors)])


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan(""))
    yield failpoints.set_plan
    failpoints.set_plan("")


def _nudged(*names: str) -> Tensors:
    made = {name: tensor.clone() for name, tensor in toy_tensors(1).items()}
    for name in names:
        as_ints(made[name]).reshape(-1)[0] ^= 1 << 20
    return made


def _holds(rank: Worker, tensors: Tensors, dtype: Any = torch.float32) -> bool:
    wanted = load_for_real(ToyModel(rank=rank.rank, dtype=dtype), tensors)
    return all(
        torch.equal(as_ints(rank.model.get_parameter(name)), as_ints(parameter))
        for name, parameter in wanted.named_parameters()
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("amount", [_ROOM, _NONE], ids=["room", "none"])
def test_everything_is_written_and_proved_and_restored(
    make: Callable[..., Worker],
    stage: Callable[[Tensors], Version],
    amount: Amount,
    rank: int,
    dtype: Any,
) -> None:
    worker = make(amount, rank=rank, dtype=dtype)
    second = stage(toy_tensors(2))
    report = worker.job("prepare", "two", second, base="base")
    assert (report["phase"], report["patched"]) == ("ready", False)
    assert (report["h2d_bytes"] > 0) is (amount is _ROOM)
    reply = worker.call("commit", apply_id="two")
    assert (reply["ok"], reply["content_digest"]) == (True, second.content_digest)
    # What it is compared with may have changed since the server digested it.
    assert reply["compared_all"] is False
    assert (reply["h2d_bytes"] > 0) is (amount is _NONE)
    assert _holds(worker, toy_tensors(2), dtype)
    assert worker.job("verify", "two")["proved"] is True
    assert worker.call("commit", apply_id="base")["compared_all"] is False
    assert _holds(worker, toy_tensors(1), dtype)


@pytest.mark.parametrize("amount", [_ROOM, Amount(1500)], ids=["room", "little"])
def test_a_patch_is_exact_and_so_is_the_way_back(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version], amount: Amount
) -> None:
    worker = make(amount)
    tensors = _nudged("q", "k_bias", "down", "head")
    tensors["k"] += 1
    second = stage(tensors)
    report = worker.job("prepare", "two", second, base="base")
    assert report["patched"] is True
    assert report["device_used"] > 0
    before = {name: p.data_ptr() for name, p in worker.model.named_parameters()}
    reply = worker.call("commit", apply_id="two")
    assert (reply["patched"], reply["compared_all"]) == (True, False)
    assert reply["content_digest"] == second.content_digest
    assert reply["written_bytes"] == report["bytes"]
    assert _holds(worker, tensors)
    assert {name: p.data_ptr() for name, p in worker.model.named_parameters()} == before
    assert worker.job("verify", "two", gives_way=True)["proved"] is True
    assert worker.job("prepare", "back", stage(toy_tensors(1)), base="two")["patched"] is True
    assert worker.call("commit", apply_id="back")["patched"] is True
    assert _holds(worker, toy_tensors(1))


def test_not_all_is_looked_at_when_a_sample_shows_that_nearly_all_changed(
    make: Callable[..., Worker],
    stage: Callable[[Tensors], Version],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []

    def noted(count: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def counted(self: Any, *rest: Any) -> list[int]:
            looks.append(sum(live.numel() for live, _ in self._pairs))
            return count(self, *rest)

        return counted

    for kind in (TorchFinder, KernelFinder):
        monkeypatch.setattr(kind, "count", noted(kind.count))
    monkeypatch.setattr(device_patch, "_SAMPLE", 2)
    monkeypatch.setattr(device_patch, "_ENOUGH", 2)
    monkeypatch.setattr(device_patch, "_GLANCE", 3)
    monkeypatch.setattr(device_patch, "_WORTH", 2)
    worker = make()
    looks.clear()
    assert worker.job("prepare", "all", stage(toy_tensors(2)), base="base")["patched"] is False
    (sample,) = looks
    # Of every second of six pieces no more than three elements.
    assert sample <= 9
    assert worker.job("prepare", "some", stage(_nudged("q")), base="base")["patched"] is True
    assert looks[1] == sample
    assert sum(looks[2:]) > sample


@pytest.mark.parametrize("amount", [_ROOM, _NONE], ids=["room", "none"])
def test_a_byte_that_was_not_written_is_named(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version], amount: Amount
) -> None:
    worker = make(amount)
    worker.job("prepare", "two", stage(toy_tensors(2)), base="base")
    live, wrong = worker.model.down.data.view(torch.uint8), []
    copy = torch.Tensor.copy_

    def damage(self: Any, *args: Any, **named: Any) -> Any:
        made = copy(self, *args, **named)
        if self.data_ptr() == live.data_ptr():
            live[0, 0] ^= 1
            wrong.append(self)
        return made

    def launched(self: HostKernels, *args: Any) -> None:
        queue(self, *args)
        if self.ran[-1] == "copy_spans" and not wrong:
            live[0, 0] ^= 1
            wrong.append(live)

    queue = HostKernels.queue
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", damage)
        patched.setattr(HostKernels, "queue", launched)
        reply = worker.call("commit", apply_id="two")
    assert wrong
    assert (reply["ok"], reply["mismatched"]) == (False, ["down"])
    assert worker.call("state")["content_digest"] == ""
    assert worker.call("commit", apply_id="base")["ok"]
    assert _holds(worker, toy_tensors(1))


def test_an_element_of_a_patch_that_was_not_written_is_named(
    make: Callable[..., Worker],
    stage: Callable[[Tensors], Version],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker = make()
    worker.job("prepare", "two", stage(_nudged("k", "down")), base="base")
    write = device_patch.DevicePatch.write

    def damage(self: Any, threads: Any) -> None:
        write(self, threads)
        as_ints(worker.model.down.data)[0, 0] ^= 2

    monkeypatch.setattr(device_patch.DevicePatch, "write", damage)
    reply = worker.call("commit", apply_id="two")
    assert (reply["ok"], reply["mismatched"]) == (False, ["down"])


def test_what_was_staged_wrong_is_found_after_the_pause(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make()
    version = stage(toy_tensors(2))
    send = staged_write.send_blocks
    with pytest.MonkeyPatch.context() as patched:

        def damage(blocks: Any, sources: Any, memory: Any, *rest: Any) -> None:
            send(blocks, sources, memory, *rest)
            memory[0] ^= 1

        patched.setattr("weightsync.vllm.cuda.cuda_ops.send_blocks", damage)
        worker.job("prepare", "two", version, base="base")
    reply = worker.call("commit", apply_id="two")
    assert (reply["ok"], reply["compared_all"]) == (True, False)
    report = worker.job("verify", "two", gives_way=True)
    assert (report["proved"], len(report["mismatched"])) == (False, 1)


def test_without_a_base_it_is_compared_with_what_was_sent(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make()
    assert worker.job("prepare", "two", stage(toy_tensors(2)))["h2d_bytes"] == 0
    assert worker.call("commit", apply_id="two")["compared_all"] is False
    assert _holds(worker, toy_tensors(2))


def test_without_memory_to_find_what_changes_everything_is_copied(
    make: Callable[..., Worker],
    stage: Callable[[Tensors], Version],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def exhausted(*_: Any) -> None:
        raise torch.OutOfMemoryError

    worker = make()
    monkeypatch.setattr("weightsync.vllm.cuda.cuda_ops.fill", exhausted)
    report = worker.job("prepare", "two", stage(_nudged("q")), base="base")
    assert (report["phase"], report["patched"]) == ("ready", False)
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, _nudged("q"))


def test_a_smaller_room_drops_what_was_staged(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make()
    worker.job("prepare", "two", stage(_nudged("q")), base="base")
    worker._weightsync_rank.set_budget(0)  # type: ignore[attr-defined]
    assert worker.call("state")["device_used"] == _SCRATCH
    reply = worker.call("commit", apply_id="two")
    assert (reply["compared_all"], reply["patched"]) == (False, False)
    assert _holds(worker, _nudged("q"))


def test_a_loader_gets_what_a_plan_has_taken(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make()
    worker.job("prepare", "two", stage(_nudged("q")), base="base")
    before = worker.call("state")
    assert before["device_used"] > _SCRATCH

    def no_loader() -> None:
        raise OSError

    worker._weightsync_rank._make_shadow = no_loader  # type: ignore[attr-defined]
    assert worker.call("load", group="0" * 32, document="none")["ok"] is False
    state = worker.call("state")
    assert (state["device_used"], state["device_room"]) == (_SCRATCH, before["device_room"])


def test_another_version_on_the_device_takes_nothing_from_the_one_before(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make()
    worker.job("prepare", "two", stage(_nudged("q")), base="base")
    worker.job("prepare", "three", stage(toy_tensors(3)), base="base")
    assert worker.call("commit", apply_id="two")["compared_all"] is False
    assert _holds(worker, _nudged("q"))
    assert worker.call("commit", apply_id="three")["compared_all"] is False
    assert _holds(worker, toy_tensors(3))


def test_a_patch_is_not_written_over_anything_else(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make()
    assert worker.job("prepare", "two", stage(_nudged("q")), base="base")["patched"] is True
    worker.model.head.data.zero_()
    assert worker.job("verify", "base")["proved"] is False
    reply = worker.call("commit", apply_id="two")
    assert (reply["ok"], reply["patched"]) == (True, False)
    assert _holds(worker, _nudged("q"))


def test_the_room_is_never_exceeded(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version]
) -> None:
    worker = make(Amount(4096))
    for number in range(2, 6):
        tensors = toy_tensors(number) if number % 2 else _nudged("q", "embed")
        worker.job("prepare", str(number), stage(tensors), base="base")
        state = worker.call("state")
        assert state["device_room"] == 4096
        assert state["device_used"] - _SCRATCH <= 4096
        assert worker.call("commit", apply_id=str(number))["ok"]
    assert _holds(worker, toy_tensors(5))


def test_a_prepare_that_is_still_at_work_ends_before_a_commit(
    make: Callable[..., Worker], stage: Callable[[Tensors], Version], plan: Callable[[str], None],
    staging: Staging,
) -> None:  # fmt: skip
    worker = make()
    worker.job("prepare", "two", stage(toy_tensors(2)))
    plan("worker.map=1*sleep(0.3)")
    page, _ = staging.pages(["0/0/0"])
    third = stage(toy_tensors(3))
    assert worker.call("prepare", apply_id="three", document=third.document.id, page=page)["ok"]
    assert worker.call("commit", apply_id="two")["ok"]
    assert worker.call("state")["busy"] == ""
    assert worker.call("state")["prepared"] == ["base", "two"]
    assert _holds(worker, toy_tensors(2))
