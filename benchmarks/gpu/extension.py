"""Methods that this benchmark adds to vLLM's workers, through --worker-extension-cls."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

__all__ = ["GpuProbe"]


class GpuProbe:
    """Loads weights as a peer does, and compares live parameters with code of its own.

    Attributes:
        model_runner: Of the worker that this becomes part of.
        device: Of the worker.
        model_config: Of the worker.
    """

    model_config: Any
    model_runner: Any
    device: Any
    _weightsync_rank: Any

    def bench_load_files(self, folder: str) -> float:
        """Load weights from ordinary mappings of files in shared memory; returns seconds.

        So does torchforge: views of shared memory, straight into the model's own loaders.
        """
        from benchmarks.gpu.checkpoint import Files

        begin = time.perf_counter()
        with Files(Path(folder)) as files:
            self.model_runner.get_model().load_weights(files.tensors.items())
            self._bench_wait()
        return time.perf_counter() - begin

    def bench_checkpoint_engine(self, handles: dict[str, str]) -> float:
        """Load what checkpoint-engine's parameter server sends; returns seconds.

        As its own extension of vLLM's workers does, which cannot be loaded beside this one.

        Args:
            handles: Addresses of its sockets by the UUID of a GPU.
        """
        import zmq
        from checkpoint_engine.worker import update_weights_from_ipc
        from vllm.model_executor.model_loader.utils import process_weights_after_loading

        begin = time.perf_counter()
        model = self.model_runner.get_model()
        (handle,) = handles.values()
        update_weights_from_ipc(
            zmq.Context.instance(),
            handle,
            self.device.index,
            run=model.load_weights,
            post_hook=lambda: process_weights_after_loading(model, self.model_config, self.device),
        )
        return time.perf_counter() - begin

    def bench_keep(self) -> int:
        """Keep a copy of all live parameters beside them; returns its bytes."""
        self._bench_kept = {
            name: parameter.detach().clone() for name, parameter in self._bench_parameters()
        }
        self._bench_wait()
        return sum(kept.nbytes for kept in self._bench_kept.values())

    def bench_same(self) -> bool:
        """Whether every byte of every live parameter is that of the kept copy."""
        import torch

        live = dict(self._bench_parameters())
        if live.keys() != self._bench_kept.keys():
            return False
        return all(
            torch.equal(_bytes(parameter), _bytes(self._bench_kept[name]))
            for name, parameter in live.items()
        )

    def bench_drop(self) -> None:
        """Forget the kept copy."""
        import torch

        self._bench_kept = {}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def bench_digests(self) -> dict[str, str]:
        """Return digests of all that the model, and its draft, compute from."""
        from benchmarks.gpu.live_digests import live_digests

        self._bench_wait()
        found = live_digests(self.model_runner.get_model())
        draft = getattr(getattr(self.model_runner, "drafter", None), "model", None)
        if draft is not None:
            found |= {f"draft.{name}": digest for name, digest in live_digests(draft).items()}
        return found

    def bench_process(self) -> dict[str, Any]:
        """Return the worker's process id, and with which CUDA graphs it runs."""
        import os

        graphs = getattr(self.model_runner.compilation_config, "cudagraph_mode", None)
        return {"pid": os.getpid(), "cuda_graphs": getattr(graphs, "name", str(graphs))}

    def bench_room(self, size: int) -> None:
        """Give our rank another budget of device memory."""
        self._weightsync_rank.set_budget(size)

    def bench_memory(self) -> int:
        """Return the bytes in use on the device, by whomever; 0 on a processor."""
        import torch

        if self.device.type != "cuda":
            return 0
        free, total = torch.cuda.mem_get_info(self.device)
        return int(total - free)

    def _bench_parameters(self) -> list[tuple[str, Any]]:
        return sorted(self.model_runner.get_model().named_parameters())

    def _bench_wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _bytes(tensor: Any) -> Any:
    import torch

    return tensor.detach().contiguous().view(-1).view(torch.uint8)
