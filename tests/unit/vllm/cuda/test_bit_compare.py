"""Comparisons on a device, with the host's memory in its place."""

from __future__ import annotations

import weakref

import numpy as np
import torch

from weightsync.vllm.cuda.staged_write import Comparison


def test_what_differs_is_named_once() -> None:
    comparison = Comparison(torch.zeros(64, dtype=torch.bool), 3)
    comparison.queue_one("same", torch.ones(10), torch.ones(10))
    comparison.add("other", torch.ones(10), torch.zeros(10))
    comparison.add("other", torch.zeros(1000), torch.ones(1000))
    comparison.queue()
    assert comparison.wrong() == ["other"]


def test_what_was_compared_at_once_is_not_kept() -> None:
    comparison = Comparison(torch.zeros(64, dtype=torch.bool), 1)
    memory = np.ones(10, np.float32)
    alive = weakref.ref(memory)
    comparison.queue_one("a", torch.zeros(10), torch.from_numpy(memory))
    del memory
    assert alive() is None
    assert comparison.wrong() == ["a"]
