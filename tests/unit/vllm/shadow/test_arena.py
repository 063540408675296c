"""The arena is one piece of memory for the loader and for the rank."""

from __future__ import annotations

import os

import pytest
import torch

from weightsync.vllm.shadow.arena import LoaderArena, RankArena

CPU = torch.device("cpu")
SIZES = (1000, 1, 4096)


def test_both_see_the_same_bytes() -> None:
    loader = LoaderArena(SIZES, CPU)
    document, fds = loader.share()
    rank = RankArena(document, [os.dup(fd) for fd in fds], SIZES, CPU)
    assert [row.numel() for row in rank.memory] == list(SIZES)
    for value, row in enumerate(loader.memory):
        row.fill_(value + 1)
    assert [int(row[-1]) for row in rank.memory] == [1, 2, 3]
    rank.memory[1].fill_(9)
    assert int(loader.memory[1][0]) == 9
    assert [row.data_ptr() % 512 for row in rank.memory] == [0, 0, 0]


def test_the_descriptor_is_closed_whatever_happens() -> None:
    document, fds = LoaderArena(SIZES, CPU).share()
    given = os.dup(fds[0])
    with pytest.raises(KeyError):
        RankArena({}, [given], SIZES, CPU)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given)
    assert document["bytes"] >= sum(SIZES)
