"""CUDA IPC handles as plain data: what `reduce_tensor` of PyTorch makes holds classes.

Classes would travel between vLLM's processes as pickles, and what is unpickled runs code.
"""

from __future__ import annotations

from typing import Any

import torch

#: Fields of vLLM's update info over IPC.
HANDLES, PICKLED = "ipc_handles", "ipc_handles_pickled"

#: Where classes and the dtype stand among the arguments of PyTorch's rebuild_cuda_tensor.
_TENSOR, _STORAGE, _DTYPE = 0, 4, 5
_ARGUMENTS = 15
_CLASSES: tuple[type, ...] = (
    torch.Tensor,
    torch.nn.Parameter,
    torch.UntypedStorage,
    torch.storage.TypedStorage,
)
_BY_NAME = {kind.__name__: kind for kind in _CLASSES}


def to_plain(handles: Any) -> Any:
    """Return the handles of one buffer, or a list of such, as JSON has it.

    Handles map a GPU's UUID to the arguments of `rebuild_cuda_tensor`. Raises ValueError for
    anything else.
    """
    if isinstance(handles, list):
        return [to_plain(each) for each in handles]
    if not isinstance(handles, dict):
        raise _no_handles(handles)
    return {_text(uuid): _plain_arguments(arguments) for uuid, arguments in handles.items()}


def from_plain(handles: Any) -> Any:
    """Return handles as vLLM's engine rebuilds tensors from, or raise ValueError."""
    if isinstance(handles, list):
        return [from_plain(each) for each in handles]
    if not isinstance(handles, dict):
        raise _no_handles(handles)
    return {uuid: _arguments(arguments) for uuid, arguments in handles.items()}


def _text(uuid: Any) -> str:
    if not isinstance(uuid, str):
        raise _no_handles(uuid)
    return uuid


def _plain_arguments(arguments: Any) -> list[Any]:
    if not isinstance(arguments, tuple | list) or len(arguments) != _ARGUMENTS:
        raise _no_handles(arguments)
    return [_plain(value) for value in arguments]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, type) and _BY_NAME.get(value.__name__) is value:
        return {"class": value.__name__}
    if isinstance(value, tuple | list) and all(type(size) is int for size in value):
        return list(value)
    raise _no_handles(value)


def _arguments(plain: Any) -> tuple[Any, ...]:
    if not isinstance(plain, list) or len(plain) != _ARGUMENTS:
        raise _no_handles(plain)
    values = tuple(_value(each) for each in plain)
    fits = values[_TENSOR] in _CLASSES and values[_STORAGE] in _CLASSES
    if not fits or not isinstance(values[_DTYPE], torch.dtype):
        raise _no_handles(plain)
    return values


def _value(plain: Any) -> Any:
    if isinstance(plain, list):
        return torch.Size(plain)
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == "bytes":
        return bytes.fromhex(value)
    found = getattr(torch, str(value), None) if kind == "dtype" else _BY_NAME.get(value)
    if found is None or (kind == "dtype" and not isinstance(found, torch.dtype)):
        raise _no_handles(plain)
    return found


def _no_handles(value: Any) -> ValueError:
    return ValueError(
        f"{HANDLES} holds {type(value).__name__} {str(value)[:60]!r}, which is not part of a CUDA "
        "IPC handle; send what torch.multiprocessing.reductions.reduce_tensor returns"
    )
