"""Handles of CUDA memory travel as plain data; nothing else passes for one."""

from __future__ import annotations

import inspect
import json
import os
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from weightsync.vllm.extensions.received.ipc_handles import from_plain, to_plain

#: As torch.multiprocessing.reductions.reduce_tensor makes them, for rebuild_cuda_tensor.
_ARGUMENTS: tuple[Any, ...] = (
    torch.nn.Parameter,
    torch.Size([2, 3]),
    (3, 1),
    0,
    torch.UntypedStorage,
    torch.bfloat16,
    0,
    b"\x00\xff" * 32,
    12,
    0,
    False,
    b"counter",
    4,
    b"event",
    True,
)


@pytest.mark.parametrize("handles", [{"GPU-1": _ARGUMENTS}, [{"GPU-1": _ARGUMENTS}] * 2])
def test_they_come_back_as_they_were(handles: Any) -> None:
    plain = to_plain(handles)
    # What JSON holds is data: no class and no function comes of reading it.
    assert from_plain(json.loads(json.dumps(plain))) == handles


def test_pytorch_takes_as_many_arguments() -> None:
    names = list(inspect.signature(rebuild_cuda_tensor).parameters)
    assert len(names) == len(_ARGUMENTS)
    assert (names[0], names[4], names[5]) == ("tensor_cls", "storage_cls", "dtype")


@pytest.mark.parametrize(
    "handles",
    [
        None,
        "gASV",
        [1],
        {"GPU-1": 5},
        {1: _ARGUMENTS},
        {"GPU-1": _ARGUMENTS[:-1]},
        {"GPU-1": (os.system, *_ARGUMENTS[1:])},
        {"GPU-1": (dict, *_ARGUMENTS[1:])},
        {"GPU-1": (*_ARGUMENTS[:-1], object())},
        {"GPU-1": (*_ARGUMENTS[:-1], [object()])},
    ],
)
def test_what_is_no_handle_is_refused(handles: Any) -> None:
    with pytest.raises(ValueError, match="not part of a CUDA IPC handle"):
        to_plain(handles)


@pytest.mark.parametrize(
    "change",
    [
        (0, {"class": "Module"}),
        (0, {"dtype": "int8"}),
        (4, {"class": "Tensorx"}),
        (5, {"dtype": "load"}),
        (5, 7),
        (7, {"class": "system"}),
    ],
)
def test_plain_data_that_is_no_handle_is_refused(change: tuple[int, Any]) -> None:
    plain = to_plain({"GPU-1": _ARGUMENTS})
    plain["GPU-1"][change[0]] = change[1]
    with pytest.raises(ValueError, match="not part of a CUDA IPC handle"):
        from_plain(plain)
    others: tuple[Any, ...] = (3, {"GPU-1": 3}, {"GPU-1": []})
    for other in others:
        with pytest.raises(ValueError, match="not part of a CUDA IPC handle"):
            from_plain(other)
