"""A room that a user asked for is left by vLLM's cache, or vLLM says when it starts why not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm.env import Amount
from weightsync.vllm.plugin import reserve_room


def _worker(room: str, *, device: str = "cuda", fixed: int | None = None) -> Any:
    class Worker:
        """As much of vLLM's as is looked at: 1000 bytes, of which it may take 800."""

        def __init__(self) -> None:
            self.device = SimpleNamespace(type=device)
            self.init_snapshot = SimpleNamespace(total_memory=1000)
            self.requested_memory = 800
            self.cache_config = SimpleNamespace(kv_cache_memory_bytes=fixed)

        def determine_available_memory(self) -> int:
            return fixed or 300

    for _ in range(2):
        reserve_room(Worker, Amount.parse(room))
    return Worker()


@pytest.mark.parametrize(
    ("room", "cache"), [("0", 300), ("200", 300), ("250", 250), ("45%", 50), ("499", 1)]
)
def test_the_cache_gives_what_utilisation_does_not_leave(room: str, cache: int) -> None:
    assert _worker(room).determine_available_memory() == cache


@pytest.mark.parametrize("room", ["500", "90%"])
def test_a_room_without_a_cache_is_refused_by_name(room: str) -> None:
    with pytest.raises(ValueError, match=r"WEIGHTSYNC_DEVICE_ROOM asks for .* lower one"):
        _worker(room).determine_available_memory()


def test_a_cache_of_a_given_size_and_one_on_a_cpu_stay() -> None:
    assert _worker("400", fixed=300).determine_available_memory() == 300
    assert _worker("400", device="cpu").determine_available_memory() == 300


def test_a_worker_of_another_kind_is_left_alone() -> None:
    class Other:
        pass

    reserve_room(Other, Amount.parse("1"))
    assert not vars(Other).get("determine_available_memory")
