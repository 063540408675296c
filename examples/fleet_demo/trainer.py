"""The trainer: changes one weight in a hundred at each step, and pushes what it has."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from weightsync_client import Client, PushResult

__all__ = ["Trainer"]

_SHAPES = {"embedding": (1024, 512), "layer.weight": (512, 1024), "layer.bias": (1024,)}
_CHANGED = 0.01


class Trainer:
    """Has the weights of a model of 4 MiB, and pushes them.

    Args:
        seed: Of the weights and of all steps.
    """

    def __init__(self, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._weights = {
            name: self._random.standard_normal(shape).astype(np.float32)
            for name, shape in _SHAPES.items()
        }

    def save(self, path: Path) -> None:
        """Write the weights as they are: the checkpoint that engines start on."""
        save_file(self._weights, path)

    def step(self) -> None:
        """Change one weight in a hundred."""
        for weights in self._weights.values():
            flat = weights.reshape(-1)
            places = self._random.integers(0, flat.size, int(flat.size * _CHANGED))
            flat[places] += np.float32(1e-3)

    def push(self, client: Client) -> PushResult:
        """Push the weights as they are: all of them the first time, then what has changed."""
        return client.push(self._weights)
