"""What a tensor is, whatever it holds: its dtype and its shape."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple, Protocol

import torch

from weightsync.errors import Reason
from weightsync_client.errors import refuse
from weightsync_client.source.sharded_tensors import is_sharded
from weightsync_client.source.tensors import dtype_name

__all__ = ["TensorKind", "kind_of", "without_ties"]


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


def without_ties(tensors: Mapping[str, Any], known: Container[str]) -> dict[str, Any]:
    """Return tensors without those that are another one of them under an unknown name.

    Raises:
        InvalidError: They are no tensors by name, or one has no memory to be copied from.
    """
    if not isinstance(tensors, Mapping):
        raise refuse(
            Reason.REQUEST_INVALID,
            f"update takes tensors by name, not {type(tensors).__name__}; give it "
            "model.state_dict()",
        )
    for name, value in tensors.items():
        if not (is_sharded(value) or _is_dense(value)):
            raise refuse(
                Reason.REQUEST_INVALID,
                f"{name} is no dense tensor of PyTorch that has memory; give it as one",
            )
    places = {_place(tensor) for name, tensor in tensors.items() if name in known}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if name in known or _place(tensor) not in places
    }


def _is_dense(value: object) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.layout is torch.strided and not value.is_meta


def _place(tensor: Any) -> object:
    if is_sharded(tensor) or not tensor.numel():
        return id(tensor)
    return tensor.data_ptr(), tuple(tensor.shape), tensor.stride()


def kind_of(name: str, tensor: Typed) -> TensorKind:
    """Return what a tensor is.

    Raises:
        InvalidError: safetensors has no such dtype.
    """
    dtype = dtype_name(name, str(tensor.dtype).removeprefix("torch."))
    return TensorKind(dtype, tuple(tensor.shape))
