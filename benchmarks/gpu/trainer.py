"""The trainer: a process of its own that holds the weights on a device and hands them over.

`python -m benchmarks.gpu.trainer DEVICE FOLDER` loads a checkpoint, then answers one JSON line
{"do": ..., ...} on standard input with one on standard output, until its input ends; with
`in_place` as a device it holds no copy, and with `attached` the engine's own memory, by the address
of a server in place of a folder. `benchmarks.gpu.link` is the other end.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from benchmarks.gpu.attached_trainer import AttachedTrainer
from benchmarks.gpu.checkpoint import Files
from benchmarks.gpu.content import as_ints, gray_step
from benchmarks.gpu.in_place import InPlaceTrainer

if TYPE_CHECKING:
    from weightsync_client import Client

__all__ = ["ATTACHED", "IN_PLACE", "Trainer"]

#: Of the trainers of these names, where a device is told.
ATTACHED, IN_PLACE = "attached", "in_place"
_OTHERS = {ATTACHED: AttachedTrainer, IN_PLACE: InPlaceTrainer}
_DTYPES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


class Trainer:
    """Weights on a device, and every way to hand them over.

    Args:
        device: Of PyTorch.
        folder: Checkpoint to begin with.
    """

    def __init__(self, device: str, folder: str) -> None:
        import torch

        self._torch = torch
        self._device = torch.device(device)
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device.index or 0)
        with Files(Path(folder)) as files:
            self.tensors = {
                name: tensor.to(self._device, copy=True) for name, tensor in files.tensors.items()
            }
        self._changes = 0
        #: Of each tensor of which rows are held: its whole shape, and the first row.
        self._places: dict[str, tuple[tuple[int, ...], int]] = {}
        self._files: dict[str, Files] = {}
        self._clients: dict[str, Client] = {}
        self._live: AttachedTrainer | None = None
        self._group: Any = None
        self._engine: Any = None
        self._random = torch.Generator(device=self._device)
        self._random.manual_seed(1)
        self._settle()

    def change(self) -> dict[str, Any]:
        """Change every value; returns by which bits. The last 15 contents are all different."""
        self._changes += 1
        mask = gray_step(self._changes)
        for tensor in self.tensors.values():
            as_ints(tensor).bitwise_xor_(mask)
        self._settle()
        return {"mask": mask}

    def change_some(self, share: float) -> dict[str, Any]:
        """Change the lowest bit of some values; returns how many."""
        torch = self._torch
        changed = 0
        for tensor in self.tensors.values():
            flat = as_ints(tensor).view(-1)
            count = max(1, int(len(flat) * share))
            where = torch.randint(
                len(flat), (count,), generator=self._random, device=self._device
            ).unique()
            flat.index_copy_(0, where, flat.index_select(0, where) ^ 1)
            changed += len(where)
        self._settle()
        return {"changed": changed}

    def push(self, address: str, delta: str = "auto", same_host: str = "auto") -> dict[str, Any]:
        """Push with the public client, which stays open as a trainer's does: deltas need it."""
        return self._pushed(address, self.tensors, delta=delta, same_host=same_host)

    def _pushed(self, address: str, tensors: dict[str, Any], **options: Any) -> dict[str, Any]:
        from weightsync_client import Client

        client = self._clients.get(address)
        if client is None:
            client = self._clients[address] = Client(address)
        begin = time.perf_counter()
        pushed = client.push(tensors, **options)
        return {
            "version": pushed.version,
            "content_digest": pushed.content_digest,
            "seconds": time.perf_counter() - begin,
            "kind": str(pushed.kind),
            "fallback_reason": str(pushed.fallback_reason),
            "sent_bytes": pushed.sent_bytes,
            "size_bytes": pushed.size_bytes,
            "way": pushed.way,
            "way_reason": pushed.way_reason,
        }

    def attach(self, address: str) -> dict[str, Any]:
        """Attach to the engine of a server."""
        self._live = AttachedTrainer(address)
        return self._live.attach()

    def detach(self) -> dict[str, Any]:
        """Detach."""
        return self._attached.detach()

    def put(self) -> dict[str, Any]:
        """Write the weights into the engine's own memory, in a transaction."""
        return self._attached.put(self.tensors)

    @property
    def _attached(self) -> AttachedTrainer:
        if self._live is None:
            msg = "attach first"
            raise RuntimeError(msg)
        return self._live

    def keep_rows(self, writer: int, writers: int) -> dict[str, Any]:
        """Hold one part of the rows of every tensor from now on, as a sharded trainer does."""
        torch = self._torch
        self._places = {}
        for name, tensor in self.tensors.items():
            first = sum(len(part) for part in torch.tensor_split(tensor, writers)[:writer])
            self._places[name] = tuple(tensor.shape), first
            self.tensors[name] = torch.tensor_split(tensor, writers)[writer].clone()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        self._settle()
        return {}

    def push_rows(self, address: str, key: str, writer: int, writers: int) -> dict[str, Any]:
        """Push these rows, as one of several processes."""
        from weightsync_client import ShardedTensor

        boxes = {}
        for name, tensor in self.tensors.items():
            shape, first = self._places[name]
            offsets = (first, *[0] * (len(shape) - 1))
            boxes[name] = ShardedTensor(shape, _DTYPES[str(tensor.dtype)], [(offsets, tensor)])
        own: dict[str, Any] = {"idempotency_key": key, "writer": writer, "writers": writers}
        return self._pushed(address, boxes, delta="never", **own)

    def write(self, folder: str) -> dict[str, Any]:
        """Write the weights into the files of a checkpoint of the same layout."""
        files = self._files.get(folder)
        if files is None:
            files = self._files[folder] = Files(Path(folder), writable=True)
        files.fill(self.tensors.items())
        self._settle()
        return {}

    def same_as(self, folder: str) -> dict[str, Any]:
        """Compare the weights with those in a folder."""
        equal = self._torch.equal
        with Files(Path(folder)) as files:
            same = all(equal(t.cpu(), files.tensors[name]) for name, t in self.tensors.items())
        return {"same": same}

    def handles(self) -> dict[str, Any]:
        """Return what vLLM's ipc backend wants to know, as its own sender makes it."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch = self._torch
        uuid = str(torch.cuda.get_device_properties(self._device).uuid)
        made = [{uuid: reduce_tensor(tensor)[1]} for tensor in self.tensors.values()]  # type: ignore[no-untyped-call]  # torch's own gap
        return self._described() | {
            "packed": False,
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(made)).decode(),
        }

    def forget_handles(self) -> dict[str, Any]:
        """Free what the handles held, once the receiver is done."""
        self._torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]  # torch's own gap
        return {}

    def join(self, port: int, world_size: int) -> dict[str, Any]:
        """Form a group with vLLM's workers."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        self._group = NCCLWeightTransferEngine.trainer_init(
            {"master_address": "127.0.0.1", "master_port": port, "world_size": world_size}
        )
        return self._described()

    def send(self, *, packed: bool) -> dict[str, Any]:
        """Broadcast the weights to the group with vLLM's own sender."""
        from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine

        NCCLWeightTransferEngine.trainer_send_weights(
            iter(self.tensors.items()), {"group": self._group, "packed": packed}
        )
        self._settle()
        return {}

    def engine_register(self, port: int) -> dict[str, Any]:
        """Register the weights with checkpoint-engine's parameter server: a copy to pinned memory.

        Args:
            port: A free one, for the group of its processes.
        """
        if self._engine is None:
            from benchmarks.gpu.parameter_server import ParameterServerLink

            self._engine = ParameterServerLink(port)
        self._engine.register(self.tensors)
        return {}

    def engine_update(self) -> dict[str, Any]:
        """Begin to send them; returns where the workers of vLLM must connect."""
        return {"handles": self._engine.begin()}

    def engine_wait(self) -> dict[str, Any]:
        """Return when all were sent."""
        self._engine.end()
        return {}

    def _described(self) -> dict[str, Any]:
        return {
            "names": list(self.tensors),
            "dtype_names": [str(t.dtype).removeprefix("torch.") for t in self.tensors.values()],
            "shapes": [list(tensor.shape) for tensor in self.tensors.values()],
        }

    def _settle(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


def _serve(trainer: object, out: TextIO) -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            answer = getattr(trainer, asked.pop("do"))(**asked)
        except Exception as error:  # noqa: BLE001 - the other end shall know
            traceback.print_exc(file=sys.stderr)
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=out, flush=True)


def main() -> None:
    """Load and answer."""
    device, folder = sys.argv[1:]
    # Libraries print what they like; answers have a descriptor of their own.
    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)
        other = _OTHERS.get(device)
        trainer = other(folder) if other else Trainer(device, folder)
        print(json.dumps({"ready": True}), file=out, flush=True)
        with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
            _serve(trainer, out)


if __name__ == "__main__":
    main()
