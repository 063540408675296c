"""vLLM's own trainer sides of CUDA IPC and NCCL, as a release has them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

from benchmarks.servers import free_port

__all__ = ["Sender", "ipc_sender", "nccl_sender"]

_HOST = "127.0.0.1"


class Sender(Protocol):
    """Sends the present weights of a model."""

    def send_weights(self) -> None:
        """Return when the engine serves them."""


def _made(info: Any, model: Any, client: Any) -> Sender:
    from vllm.distributed import weight_transfer

    sender: Sender = weight_transfer.WeightTransferTrainerFactory.trainer_init(
        info, client=client, source=weight_transfer.ModuleSource(model)
    )
    return sender


def ipc_sender(model: Any, client: Any, *, packed: bool, buffer_bytes: int) -> Sender:
    """Return a sender of a model on the engine's GPU, connected.

    Args:
        model: Whose parameters are sent.
        client: To vLLM's verbs, in a process of this host.
        packed: Whether tensors go through one buffer.
        buffer_bytes: Its size.
    """
    from vllm.distributed.weight_transfer import ipc_engine

    if hasattr(ipc_engine, "IPCTrainerInitInfo"):
        info = ipc_engine.IPCTrainerInitInfo(
            packed=packed, packed_buffer_size_bytes=buffer_bytes, rank=0
        )
        return _made(info, model, client)
    return _OldIpcSender(model, client, packed, buffer_bytes)


def nccl_sender(model: Any, client: Any, ranks: int, *, packed: bool) -> Sender:
    """Return a sender of a model on another GPU than the engine's, connected.

    Args:
        model: Whose parameters are sent.
        client: To vLLM's verbs.
        ranks: Of vLLM.
        packed: Whether tensors go through buffers.
    """
    from vllm.distributed.weight_transfer import nccl_engine

    if hasattr(nccl_engine, "NCCLTrainerInitInfo"):
        info = nccl_engine.NCCLTrainerInitInfo(_HOST, free_port(), 1 + ranks, packed=packed, rank=0)
        return _made(info, model, client)
    return _OldNcclSender(model, client, 1 + ranks, packed)


class _OldIpcSender:
    """VLLM 0.26 has functions, and the caller calls the other verbs."""

    def __init__(self, model: Any, client: Any, packed: bool, buffer_bytes: int) -> None:
        self._model, self._client = model, client
        self._args = {"packed": packed, "packed_buffer_size_bytes": buffer_bytes}
        client.init_weight_transfer_engine({})

    def send_weights(self) -> None:
        from vllm.distributed.weight_transfer.ipc_engine import IPCWeightTransferEngine

        def ship(info: Any) -> None:
            self._client.update_weights(asdict(info))

        self._client.start_weight_update()
        IPCWeightTransferEngine.trainer_send_weights(
            iter(self._model.named_parameters()), {"send_mode": ship, **self._args}
        )
        self._client.finish_weight_update()


class _OldNcclSender:
    """The same over NCCL."""

    def __init__(self, model: Any, client: Any, world: int, packed: bool) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._model, self._client, self._packed = model, client, packed
        meeting = {"master_address": _HOST, "master_port": free_port(), "world_size": world}
        with ThreadPoolExecutor(1) as pool:
            met = pool.submit(client.init_weight_transfer_engine, meeting | {"rank_offset": 1})
            self._group = NCCLWeightTransferEngine.trainer_init(meeting)
            met.result()

    def send_weights(self) -> None:
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        kinds = dict(self._model.named_parameters())
        info = {
            "names": list(kinds),
            "dtype_names": [str(p.dtype).removeprefix("torch.") for p in kinds.values()],
            "shapes": [list(p.shape) for p in kinds.values()],
            "packed": self._packed,
        }
        self._client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            received = pool.submit(self._client.update_weights, info)
            NCCLWeightTransferEngine.trainer_send_weights(
                iter(kinds.items()), {"group": self._group, "packed": self._packed}
            )
            received.result()
        self._client.finish_weight_update()
