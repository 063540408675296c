"""One rank that writes only what changes: exact, proved, and restored in full when it is not."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync import failpoints
from weightsync.model.tensor_bits import as_ints
from weightsync.vllm.apply import host_ops, host_params, host_patch
from weightsync.vllm.plan.int_views import joined_digest_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.staging import Staging, Version
    from weightsync.vllm.apply.parallel import SliceThreads

Tensors = dict[str, torch.Tensor]


def _nudged(tensors: Tensors, *names: str, at: int = 1) -> Tensors:
    """Return a version in which one element of each named tensor differs by one bit."""
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for name in names:
        words = as_ints(made[name]).reshape(-1)
        words[at % len(words)] ^= 1
    return made


@pytest.fixture
def stage(staging: Staging) -> Callable[[Tensors], Version]:
    return lambda tensors: staging.stage_files([save(tensors)])


@pytest.fixture
def rank(staging: Staging, stage: Callable[[Tensors], Version]) -> Worker:
    made = Worker(load_for_real(ToyModel(), toy_tensors(1)), staging)
    made.adopt(stage(toy_tensors(1)))
    return made


def _holds(rank: Worker, tensors: Tensors, **options: Any) -> bool:
    wanted = load_for_real(ToyModel(rank=rank.rank, **options), tensors)
    return all(
        torch.equal(as_ints(rank.model.get_parameter(name)), as_ints(parameter))
        for name, parameter in wanted.named_parameters()
    )


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_patch_and_the_way_back_are_exact(
    staging: Staging, stage: Callable[[Tensors], Version], which: int, dtype: Any
) -> None:
    rank = Worker(load_for_real(ToyModel(rank=which, dtype=dtype), toy_tensors(1)), staging, which)
    first, second = toy_tensors(1), toy_tensors(1)
    # The columns of both ranks, both halves of what is fused, a tensor without dimensions.
    second["down"][2] += 1
    second["k"][::2, 1] -= 2
    second["q_bias"][1::2] += 1
    second["scale"] += 1
    rank.adopt(stage(first))
    version = stage(second)
    report = rank.job("prepare", "two", version, base="base")
    assert report["patched"] is True
    reply = rank.call("commit", apply_id="two")
    assert (reply["patched"], reply["content_digest"]) == (True, version.content_digest)
    size = torch.empty(0, dtype=dtype).element_size()
    # Three columns of a row of down, one of a row of k; q's two biases and the scale in full.
    assert reply["written_bytes"] == report["bytes"] == (3 + 1 + 2 + 1) * size
    assert _holds(rank, second, dtype=dtype)
    assert rank.job("verify", "two")["proved"] is True
    assert rank.job("prepare", "back", stage(first), base="two")["patched"] is True
    assert rank.call("commit", apply_id="back")["patched"] is True
    assert _holds(rank, first, dtype=dtype)


def test_the_same_content_again_writes_nothing(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    report = rank.job("prepare", "again", stage(toy_tensors(1)), base="base")
    assert (report["patched"], report["bytes"]) == (True, 0)
    reply = rank.call("commit", apply_id="again")
    assert (reply["patched"], reply["written_bytes"], reply["ok"]) == (True, 0, True)
    assert rank.call("state")["apply_id"] == "again"


def test_tensors_of_equal_digest_are_not_compared(
    rank: Worker, stage: Callable[[Tensors], Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    known: list[int] = []

    def find(slices: Any, old: Any, *rest: Any) -> Any:
        known.extend(i for i, source in enumerate(old) if source is not None)
        return find_all(slices, old, *rest)

    find_all = host_params.find_differences
    monkeypatch.setattr(host_params, "find_differences", find)
    rank.job("prepare", "two", stage(_nudged(toy_tensors(1), "k")), base="base")
    assert len(known) == 1


def test_a_slice_that_changed_much_is_copied_within_a_patch(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    tensors = _nudged(toy_tensors(1), "embed", at=7)
    tensors["q"] += 1
    report = rank.job("prepare", "two", stage(tensors), base="base")
    # Two rows of q, and one element.
    assert (report["patched"], report["bytes"]) == (True, 2 * 4 * 4 + 4)
    assert rank.call("commit", apply_id="two")["ok"]
    assert _holds(rank, tensors)


def test_no_patch_without_a_proved_base_of_the_same_plan(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    version = stage(_nudged(toy_tensors(1), "k"))
    assert rank.job("prepare", "a", version)["patched"] is False
    assert rank.job("prepare", "b", version, base="unheard")["patched"] is False
    # Another base than the live one, whatever the server says.
    assert rank.job("prepare", "other", stage(toy_tensors(2)))["phase"] == "ready"
    assert rank.job("prepare", "c", version, base="other")["patched"] is False
    assert rank.job("prepare", "d", stage(toy_tensors(2)), base="base")["patched"] is False
    rank.model.head.data.view(torch.uint8)[0, 0] ^= 1
    assert rank.job("verify", "base")["proved"] is False
    assert rank.job("prepare", "e", version, base="base")["patched"] is False


def test_a_patch_whose_base_is_gone_is_written_in_full(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    nudged, version = _nudged(toy_tensors(1), "k"), stage(_nudged(toy_tensors(1), "k"))
    assert rank.job("prepare", "two", version, base="base")["patched"] is True
    rank.job("prepare", "three", stage(toy_tensors(3)))
    assert rank.call("commit", apply_id="three")["ok"]
    reply = rank.call("commit", apply_id="two")
    assert (reply["ok"], reply["patched"]) == (True, False)
    assert _holds(rank, nudged)
    assert rank.job("prepare", "four", stage(toy_tensors(1)), base="two")["patched"] is True
    rank.model.head.data.view(torch.uint8)[0, 0] ^= 1
    assert rank.job("verify", "two")["proved"] is False
    assert rank.call("commit", apply_id="four")["patched"] is False
    assert _holds(rank, toy_tensors(1))


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    monkeypatch.setattr(failpoints, "_plan", failpoints._Plan(""))
    yield failpoints.set_plan
    failpoints.set_plan("")


@pytest.mark.parametrize("point", ["worker.patch", "worker.half", "worker.written"])
def test_a_patch_that_fails_is_restored_in_full(
    rank: Worker,
    stage: Callable[[Tensors], Version],
    plan: Callable[[str], None],
    point: str,
) -> None:
    names = ("embed", "head", "q", "k", "down")
    rank.job("prepare", "two", stage(_nudged(toy_tensors(1), *names)), base="base")
    plan(f"{point}=1*error(ENOMEM)")
    reply = rank.call("commit", apply_id="two")
    assert not reply["ok"]
    assert "Cannot allocate memory" in reply["error"]
    state = rank.call("state")
    assert (state["content_digest"], state["dirty"]) == ("", True)
    assert _holds(rank, toy_tensors(1)) is (point == "worker.patch")
    reply = rank.call("commit", apply_id="base")
    assert (reply["ok"], reply["patched"]) == (True, False)
    assert _holds(rank, toy_tensors(1))
    assert rank.job("verify", "base")["proved"] is True


def test_an_element_that_does_not_hold_is_found_in_the_pause_and_any_bit_after_it(
    rank: Worker, stage: Callable[[Tensors], Version], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = host_patch.HostPatch.write
    rank.job("prepare", "two", stage(_nudged(toy_tensors(1), "k", "down")), base="base")

    def damage(self: host_patch.HostPatch, threads: SliceThreads) -> None:
        write(self, threads)
        (change,) = [change for change in self.changes if change.param == "down"]
        self.targets.memory("down")[change.positions.long()] ^= 2

    monkeypatch.setattr(host_patch.HostPatch, "write", damage)
    reply = rank.call("commit", apply_id="two")
    assert (reply["ok"], reply["mismatched"]) == (False, ["down"])
    monkeypatch.undo()
    assert rank.call("commit", apply_id="base")["ok"]
    version = stage(_nudged(toy_tensors(1), "k"))
    rank.job("prepare", "three", version, base="base")
    rank.model.head.data.view(torch.uint8)[0, 0] ^= 1
    reply = rank.call("commit", apply_id="three")
    assert (reply["ok"], reply["content_digest"]) == (True, version.content_digest)
    report = rank.job("verify", "three", gives_way=True)
    assert (report["proved"], report["mismatched"]) == (False, ["head"])
    assert rank.call("state")["content_digest"] == ""


def test_a_copied_slice_of_a_patch_is_digested_in_the_pause(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    tensors = toy_tensors(1)
    tensors["q"] += 1
    version = stage(tensors)
    assert rank.job("prepare", "two", version, base="base")["patched"] is True
    # It changes in shared memory after it was prepared.
    version.tensor_bytes("q")[3] ^= 1
    assert rank.call("commit", apply_id="two")["mismatched"] == ["qk"]


def test_replaced_parameters_are_followed(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    tensors = _nudged(toy_tensors(1), "down")
    rank.job("prepare", "two", stage(tensors), base="base")
    rank.model.down = torch.nn.Parameter(rank.model.down.clone(), requires_grad=False)
    assert rank.call("commit", apply_id="two")["patched"] is True
    assert _holds(rank, tensors)


def test_a_check_gives_way_to_the_next_job_and_its_version_stays(
    rank: Worker, staging: Staging, stage: Callable[[Tensors], Version],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    started, waiting = threading.Event(), threading.Event()

    def slow(*args: Any, **named: Any) -> bytes:
        started.set()
        waiting.wait(10)
        return joined_digest_of(*args, **named)

    page, (reader,) = staging.pages(["0/0/0"])
    monkeypatch.setattr(host_ops, "joined_digest_of", slow)
    assert rank.call("verify", apply_id="base", page=page, gives_way=True)["ok"]
    assert started.wait(10)
    threading.Timer(0.1, waiting.set).start()
    begin = time.monotonic()
    report = rank.job("prepare", "two", stage(_nudged(toy_tensors(1), "k")), base="base")
    assert (report["phase"], report["patched"]) == ("ready", True)
    assert time.monotonic() - begin < 5
    told = reader.read()
    assert told is not None
    assert told["phase"] == "failed"
    assert told["error"].startswith("the server gave this version up")
    assert rank.call("state")["prepared"] == ["base", "two"]
    assert rank.call("commit", apply_id="two")["ok"]


def test_the_digests_of_a_patched_version_are_there_when_it_must_be_restored(
    rank: Worker, stage: Callable[[Tensors], Version]
) -> None:
    # Never checked as a whole, it becomes the way back of the next apply.
    tensors = _nudged(toy_tensors(1), "k", "embed")
    version = stage(tensors)
    rank.job("prepare", "two", version, base="base")
    assert rank.call("commit", apply_id="two")["patched"] is True
    rank.job("prepare", "three", stage(toy_tensors(3)), base="two")
    assert rank.call("commit", apply_id="three")["ok"]
    reply = rank.call("commit", apply_id="two")
    assert (reply["content_digest"], reply["patched"]) == (version.content_digest, False)
    assert _holds(rank, tensors)
    rank.model.embed.data.view(torch.uint8)[0, 0] ^= 1
    assert rank.job("verify", "two")["mismatched"] == ["embed"]
