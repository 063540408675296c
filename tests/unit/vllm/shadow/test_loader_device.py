"""A loader is on its rank's own device, whatever number the rank has."""

from __future__ import annotations

import socket
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.shadow import shadow_transform
from weightsync.vllm.shadow.loader_process import LoaderProcess
from weightsync.vllm.shadow.shadow_transform import shadow_of
from weightsync.vllm.shadow.vllm_load import take_device
from weightsync.wire.documents import receive

if TYPE_CHECKING:
    from weightsync.vllm.shadow.loader_process import LoaderStart


def test_the_rank_says_which_device_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadow_transform, "dump_config", lambda _: b"")
    monkeypatch.setattr(shadow_transform, "_load_of", lambda *_: None)
    # Of an engine that was started with --device-ids 1: its first rank is on the second GPU.
    worker = SimpleNamespace(
        rank=0,
        local_rank=0,
        device=torch.device("cuda", 1),
        parallel_config=SimpleNamespace(),
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enforce_eager=True)),
    )
    twin = shadow_of(worker, torch.nn.Linear(2, 2), "0/0/0", HostOps(torch.device("cpu")), 1)
    start: LoaderStart = twin._start("0" * 32)
    assert (start.local_rank, start.device) == (0, "cuda:1")
    said = _said(start, monkeypatch)
    assert (said["local_rank"], said["device"]) == (0, "cuda:1")


def _said(start: LoaderStart, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what a loader is told at first."""

    class Child:
        pid, stdin = 1, None

        def __init__(self, command: list[str], *, pass_fds: list[int], **_: Any) -> None:
            del command
            self._sock = socket.fromfd(pass_fds[0], socket.AF_UNIX, socket.SOCK_STREAM)

        def read(self) -> dict[str, Any]:
            with self._sock:
                return receive(self._sock)

        def poll(self) -> int:
            return 0

    monkeypatch.setattr("subprocess.Popen", Child)
    monkeypatch.setattr(LoaderProcess, "_configure", lambda _: None)
    loader = LoaderProcess(start)
    child: Any = loader._child
    said: dict[str, Any] = child.read()
    loader._sock.close()
    return said


def test_the_loader_takes_it_and_knows_which_devices_ranks_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[object] = []
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    interface = SimpleNamespace(set_assigned_physical_gpu_ids=taken.append)
    monkeypatch.setitem(sys.modules, "vllm.platforms.interface", interface)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(interface=interface))
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace())
    take_device(torch.device("cuda", 1), SimpleNamespace(assigned_physical_gpu_ids=[1]))
    assert taken == [torch.device("cuda", 1), [1]]
    # Of an older release, or without the flag.
    take_device(torch.device("cuda", 0), SimpleNamespace())
    assert taken[2:] == [torch.device("cuda", 0)]
