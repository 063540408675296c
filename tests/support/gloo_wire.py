"""NCCL's communicator replaced by a gloo group, so that vLLM's NCCL transfer runs on a CPU.

Nothing else of vLLM's engine, its trainer or ours is changed. Given by --worker-extension-cls; the
file named by WEIGHTSYNC_TEST_WIRE commits faults, in the rank of the group that it names:
`RANK raise` fails the next broadcast there; `RANK silent` never answers it.
"""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import distributed

__all__ = ["GlooCommunicator", "GlooWire", "use_gloo"]

_TIMEOUT = timedelta(seconds=120)


class GlooCommunicator:
    """What vLLM's engines use of a PyNcclCommunicator."""

    def __init__(self, host: str, port: int, rank: int, world_size: int) -> None:
        self._rank = rank
        # Their types tell less than they have.
        torch_distributed: Any = distributed
        self._store = torch_distributed.TCPStore(host, port, world_size, rank == 0, _TIMEOUT)
        self._group = torch_distributed.ProcessGroupGloo(self._store, rank, world_size, _TIMEOUT)

    def broadcast(self, tensor: torch.Tensor, src: int, stream: object = None) -> None:
        """Send or receive a tensor."""
        del stream
        self._fail()
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor.detach().reshape(-1).view(torch.uint8)], options).wait()

    def destroy(self) -> None:
        """Leave the group; a wait in it goes on."""

    def _fail(self) -> None:
        path = Path(os.environ.get("WEIGHTSYNC_TEST_WIRE", "/nowhere"))
        if not path.exists():
            return
        rank, kind = path.read_text().split()
        if int(rank) != self._rank:
            return
        path.unlink()
        if kind == "silent":
            threading.Event().wait(_TIMEOUT.total_seconds())
        msg = "the wire broke"
        raise RuntimeError(msg)


def _worker_group(init_info: Any, parallel_config: Any) -> GlooCommunicator:
    rank = parallel_config.rank + init_info.rank_offset
    address = init_info.master_address, init_info.master_port
    return GlooCommunicator(*address, rank, init_info.world_size)


def _trainer_group(init_info: Any) -> GlooCommunicator:
    address = init_info.master_address, init_info.master_port
    return GlooCommunicator(*address, 0, init_info.world_size)


def use_gloo() -> None:
    """Replace the communicator in this process, of workers and of trainers."""
    from vllm.distributed.weight_transfer import nccl_engine

    nccl_engine.worker_init_process_group = _worker_group
    nccl_engine.open_trainer_endpoint = _trainer_group
    # Asked for the stream of each broadcast; a build for CPUs has none.
    torch.cuda.current_stream = lambda *_: None  # type: ignore[assignment] # None stands for it


class GlooWire:
    """Its import by a worker is all that it does."""


if "WEIGHTSYNC_TEST_WIRE" in os.environ:
    use_gloo()
