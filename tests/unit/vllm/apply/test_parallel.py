"""Every slice is done once, by several threads, and nothing goes on after a failure."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time

import pytest

torch = pytest.importorskip("torch")

from weightsync.vllm.apply.parallel import SliceThreads, commit_thread_count, taking_turns  # noqa: E402 - torch may be missing


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 100])
def test_every_slice_is_done_once(size: int, count: int) -> None:
    done: list[int] = []
    SliceThreads(size).each(done.append, list(range(count)))
    assert sorted(done) == list(range(count))


def test_threads_work_at_once_on_every_core_and_the_largest_goes_first() -> None:
    met = threading.Barrier(3, timeout=10)
    first: list[int] = []
    cores: list[int] = []

    def work(index: int) -> None:
        first.append(index)
        met.wait()
        cores.append(len(os.sched_getaffinity(0)))

    SliceThreads(3).each(work, [1, 30, 20, 10, 0, 5])
    assert sorted(first[:3]) == [1, 2, 3]
    assert cores == [os.cpu_count()] * 6


def test_a_failure_is_raised_when_nothing_is_written_any_more() -> None:
    running: list[int] = []
    begun = threading.Event()

    def work(index: int) -> None:
        if index == 0:
            begun.wait(10)
            raise OSError("broken")
        running.append(index)
        begun.set()
        time.sleep(0.1)
        running.remove(index)

    with pytest.raises(OSError, match="broken"):
        SliceThreads(2).each(work, [100, 99, *range(50)])
    assert running == []


def test_inference_tensors_are_written_by_every_thread() -> None:
    with torch.inference_mode():
        tensors = [torch.zeros(4) for _ in range(8)]
    SliceThreads(3).each(lambda index: tensors[index].fill_(index), [1] * 8)
    assert [int(tensor[0]) for tensor in tensors] == list(range(8))


def test_ranks_share_the_cores_and_a_gpu_needs_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert commit_thread_count(torch.device("cpu"), 1) == 8
    assert commit_thread_count(torch.device("cpu"), 4) == 3
    assert commit_thread_count(torch.device("cpu"), 16) == 1
    assert commit_thread_count(torch.device("cuda", 0), 1) == 1


def test_threads_take_short_turns_for_a_while() -> None:
    before = sys.getswitchinterval()
    with contextlib.suppress(KeyError), taking_turns():
        assert sys.getswitchinterval() == pytest.approx(0.0002)
        raise KeyError
    assert sys.getswitchinterval() == before
