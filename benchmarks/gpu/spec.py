"""What a checkpoint holds: the configuration of a model, and the dtype and shape of each tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from weightsync.model.dtypes import DTYPE_BITS

__all__ = ["ModelSpec", "TensorSpec"]


class TensorSpec(NamedTuple):
    """One tensor: its dtype as safetensors names it, and its shape in elements."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Of all of them."""
        return self.elements * DTYPE_BITS[self.dtype] // 8


@dataclass(frozen=True)
class ModelSpec:
    """Everything but the values.

    Attributes:
        config: What config.json holds.
        tensors: By name, in the order of the checkpoint.
    """

    config: Mapping[str, Any]
    tensors: Mapping[str, TensorSpec]

    @property
    def elements(self) -> int:
        """Of all tensors."""
        return sum(tensor.elements for tensor in self.tensors.values())

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
