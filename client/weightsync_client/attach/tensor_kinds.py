"""What a tensor is, whatever it holds: its dtype and its shape."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from weightsync_client.source.tensors import dtype_name

__all__ = ["TensorKind", "kind_of"]


class TensorKind(NamedTuple):
    """Of a whole tensor.

    Attributes:
        dtype: Safetensors dtype.
        shape: In elements.
    """

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class Typed(Protocol):
    """A tensor of PyTorch, or what stands for one."""

    @property
    def dtype(self) -> object:
        """As `str` writes it, such as `torch.float32`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """In elements."""


def kind_of(name: str, tensor: Typed) -> TensorKind:
    """Return what a tensor is.

    Raises:
        InvalidError: safetensors has no such dtype.
    """
    dtype = dtype_name(name, str(tensor.dtype).removeprefix("torch."))
    return TensorKind(dtype, tuple(tensor.shape))
