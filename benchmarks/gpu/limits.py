"""What the device and its bus do at most, measured in the run whose figures are held against it.

GB are 10^9 bytes copied, or read.

d2d_gbps            device to device
h2d_pinned_gbps     host to device from pinned memory, h2d_pageable_gbps from ordinary memory,
h2d_registered_gbps from shared memory that CUDA has registered
d2h_pinned_gbps     device to host, d2h_pageable_gbps into ordinary memory
read_gbps           a sum over device memory
scatter_1pct_s      index_copy_ of 1 % of all values into flat buffers as large as the model
memcpy_gbps         host to host, one thread
p2p_gbps            from the second GPU to the first, where there are two
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from typing import Any

from benchmarks.gpu.results import Results
from benchmarks.gpu.shape import Shape

__all__ = ["FIGURES", "measure"]

#: What this part measures.
FIGURES = (
    "d2d_gbps",
    "h2d_pinned_gbps",
    "h2d_pageable_gbps",
    "h2d_registered_gbps",
    "d2h_pinned_gbps",
    "d2h_pageable_gbps",
    "read_gbps",
    "scatter_1pct_s",
    "memcpy_gbps",
    "p2p_gbps",
)

_WARM_UP = 2
_SMALL_BLOCK = 16 << 20
_BLOCK = 4 << 30
#: Elements of one flat buffer: positions within it fit 31 bits.
_FLAT = 1 << 30
_SHARE = 100


def measure(results: Results, shape: Shape, device: str, rounds: int) -> None:
    """Measure everything; what fails is noted and the rest is measured."""
    small = shape.nbytes < _BLOCK
    block = _SMALL_BLOCK if small else _BLOCK
    bench = _Bench(results, device, rounds, block)
    results.parameters |= {"bytes": shape.nbytes, "bytes_per_rank": shape.nbytes}
    results.parameters |= {"limits_block_bytes": block}
    with results.attempt("device to device and read rate"):
        bench.on_device()
    with results.attempt("pinned memory"):
        bench.host("pinned", pinned=True)
    with results.attempt("pageable memory"):
        bench.host("pageable", pinned=False)
    if device != "cpu":
        with results.attempt("registered shared memory"):
            bench.registered()
    with results.attempt("scatter of 1 %"):
        bench.scatter(shape.elements)
    if bench.gpus > 1:
        with results.attempt("copy between GPUs"):
            _between_gpus(results, rounds, block)


class _Bench:
    def __init__(self, results: Results, device: str, rounds: int, block: int) -> None:
        import torch

        self._torch = torch
        self._results = results
        self._device = torch.device(device)
        self._rounds = rounds
        self._block = block

    @property
    def gpus(self) -> int:
        """GPUs of this host, none if they are not measured."""
        return self._torch.cuda.device_count() if self._device.type == "cuda" else 0

    def on_device(self) -> None:
        """Copy a block on the device, and read it."""
        source = self._filled(self._device)
        target = self._torch.empty_like(source)
        self._rate("d2d_gbps", lambda: target.copy_(source))
        words = source.view(self._torch.float32)
        self._rate("read_gbps", words.sum)

    def host(self, kind: str, *, pinned: bool) -> None:
        """Copy a block to the device and back."""
        near = self._filled(self._device)
        far = self._torch.ones(
            self._block, dtype=self._torch.uint8, pin_memory=pinned and self._device.type != "cpu"
        )
        self._rate(f"h2d_{kind}_gbps", lambda: near.copy_(far))
        self._rate(f"d2h_{kind}_gbps", lambda: far.copy_(near))
        if not pinned:
            other = self._torch.ones_like(far)
            threads = self._torch.get_num_threads()
            self._torch.set_num_threads(1)
            self._rate("memcpy_gbps", lambda: other.copy_(far))
            self._torch.set_num_threads(threads)

    def registered(self) -> None:
        """Copy a block to the device from a shared mapping, as the workers have segments."""
        shared = mmap.mmap(-1, self._block)
        far = self._torch.frombuffer(shared, dtype=self._torch.uint8)
        far.fill_(1)
        cudart: Any = self._torch.cuda.cudart()  # type: ignore[no-untyped-call]  # torch's own gap
        # Plain registration, readable by this device.
        failed = int(cudart.cudaHostRegister(far.data_ptr(), self._block, 0))
        if failed:
            msg = f"cudaHostRegister answered {failed}"
            raise RuntimeError(msg)
        try:
            near = self._filled(self._device)
            self._rate("h2d_registered_gbps", lambda: near.copy_(far, non_blocking=True))
        finally:
            cudart.cudaHostUnregister(far.data_ptr())
            shared.close()

    def scatter(self, elements: int) -> None:
        """Write 1 % of the values of flat buffers, at sorted positions."""
        torch = self._torch
        work = []
        for begin in range(0, elements, _FLAT):
            size = min(_FLAT, elements - begin)
            flat = torch.zeros(size, dtype=torch.int16, device=self._device)
            where = torch.randint(size, (size // _SHARE,), device=self._device)
            places = where.unique()
            work.append((flat, places, torch.ones_like(places, dtype=torch.int16)))

        def once() -> None:
            for flat, places, values in work:
                flat.index_copy_(0, places, values)

        for seconds in self._times(once):
            self._results.add(scatter_1pct_s=seconds)
        self._results.facts["scatter_1pct_elements"] = sum(len(places) for _, places, _ in work)

    def _filled(self, device: Any) -> Any:
        return self._torch.ones(self._block, dtype=self._torch.uint8, device=device)

    def _rate(self, name: str, work: Callable[[], object]) -> None:
        for seconds in self._times(work):
            self._results.add(**{name: self._block / 1e9 / seconds})

    def _times(self, work: Callable[[], object]) -> list[float]:
        times = []
        for _ in range(_WARM_UP + self._rounds):
            self._wait()
            begin = time.perf_counter()
            work()
            self._wait()
            times.append(time.perf_counter() - begin)
        return times[_WARM_UP:]

    def _wait(self) -> None:
        if self._device.type == "cuda":
            self._torch.cuda.synchronize(self._device)


def _between_gpus(results: Results, rounds: int, block: int) -> None:
    import torch

    source = torch.ones(block, dtype=torch.uint8, device="cuda:1")
    target = torch.empty(block, dtype=torch.uint8, device="cuda:0")
    for number in range(_WARM_UP + rounds):
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize("cuda:1")
        begin = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize("cuda:0")
        torch.cuda.synchronize("cuda:1")
        if number >= _WARM_UP:
            results.add(p2p_gbps=block / 1e9 / (time.perf_counter() - begin))
