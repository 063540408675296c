"""How fast a trainer's model gets to the server on its host; one client where none is told.

push_same_host_gbps       from tensors in host memory, written into the server's
push_same_host_cuda_gbps  the same from tensors on the GPU
push_sharded_cuda_gbps    four processes that share the GPU push it together, each a part of the
                          rows, from the first one's call until the last has returned; without a
                          GPU push_sharded_gbps
                          and of four of its layers:
push_stream_gbps          eight client processes send one version together, each its own shards, to
                          eight ingest processes: from its begin until all of it is verified
push_stream_one_gbps      one client process and one ingest process
push_stream_own_gbps      one client, from tensors in host memory, to the server's own process: the
                          whole push until all tensors are verified
push_cuda_gbps            the same from tensors on the GPU
grpc_floor_gbps           a bare grpcio client stream of flat messages into a warm buffer
"""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import time
from collections.abc import AsyncIterator
from pathlib import Path

from benchmarks.crowd import crowd_samples
from benchmarks.gpu.link import training
from benchmarks.gpu.results import Results
from benchmarks.push import floor_client
from benchmarks.servers import weightsync_server

__all__ = ["measure_hand_offs", "measure_streams"]

_SHARDS = 16
_CHUNK = 1 << 20
_TRAINER_S = 60.0
#: Client processes, and as many ingest processes; fewer where the benchmark is only tried.
_CROWD, _SMALL_CROWD = 8, 2
#: Processes of a sharded trainer.
_WRITERS = 4
#: Pushes that make and warm the slots.
_WARM_UP = 2
#: By device and the client's option `same_host`.
_KEYS = {
    ("cpu", "never"): "push_stream_own_gbps",
    ("cuda", "never"): "push_cuda_gbps",
    ("cpu", "auto"): "push_same_host_gbps",
    ("cuda", "auto"): "push_same_host_cuda_gbps",
}


async def measure_hand_offs(
    results: Results, folder: Path, checkpoint: Path, devices: list[str], rounds: int
) -> None:
    """Measure pushes into the server's memory, from each device."""
    # Both fill the same slots, and only the first pushes make them.
    async with _server(folder) as address:
        for device in devices:
            with results.attempt(f"pushes from {device}"):
                await _from(device, "auto", results, address, checkpoint, _WARM_UP + rounds)
        with results.attempt("pushes of several processes"):
            await _sharded(devices[-1], results, address, checkpoint, _WARM_UP + rounds)


async def measure_streams(
    results: Results, folder: Path, checkpoint: Path, devices: list[str], rounds: int
) -> None:
    """Measure streamed pushes from each device, those of many clients, and the floor."""
    nbytes = int(results.parameters["bytes_streamed"])
    async with _server(folder) as address:
        for device in devices:
            with results.attempt(f"streams from {device}"):
                await _from(device, "never", results, address, checkpoint, _WARM_UP + rounds)
    crowd = _SMALL_CROWD if results.parameters.get("small") else _CROWD
    for key, count in (("push_stream_gbps", crowd), ("push_stream_one_gbps", 1)):
        with results.attempt(f"clients and ingest processes, {count} each"):
            own = folder / key
            speeds = await asyncio.to_thread(crowd_samples, own, count, count, nbytes, rounds)
            for gbps in speeds:
                results.add(**{key: gbps})
    place = folder / "bare"
    place.mkdir()
    # Equal shards of whole chunks.
    size = max(nbytes // (_SHARDS * _CHUNK), 1) * _SHARDS * _CHUNK
    with results.attempt("bare gRPC stream"):
        await asyncio.to_thread(_floor, results, place, size, rounds)


@contextlib.asynccontextmanager
async def _server(folder: Path) -> AsyncIterator[str]:
    """Run a server until the block ends; gives its address."""
    address = f"unix:{folder}/push.sock"
    server = weightsync_server(folder, [address])
    await asyncio.to_thread(server.__enter__)
    try:
        yield address
    finally:
        await asyncio.to_thread(server.__exit__, None, None, None)


async def _from(
    device: str, same_host: str, results: Results, address: str, checkpoint: Path, pushes: int
) -> None:
    async with training(device, checkpoint, _TRAINER_S) as trainer:
        for number in results.rounds(pushes, f"push from {device}"):
            await trainer.do("change")
            pushed = await trainer.do("push", address=address, delta="never", same_host=same_host)
            if (pushed["way"] == "same_host") is not (same_host == "auto"):
                msg = f"the push went by {pushed['way']}: {pushed['way_reason']}"
                raise RuntimeError(msg)
            if number >= _WARM_UP:
                gbps = pushed["size_bytes"] / 1e9 / pushed["seconds"]
                results.add(**{_KEYS[device, same_host]: gbps})


async def _sharded(
    device: str, results: Results, address: str, checkpoint: Path, pushes: int
) -> None:
    key = "push_sharded_cuda_gbps" if device == "cuda" else "push_sharded_gbps"
    async with contextlib.AsyncExitStack() as stack:
        trainers = []
        for writer in range(_WRITERS):
            # One after the other: each has all of it on the device for a moment.
            trainer = await stack.enter_async_context(training(device, checkpoint, _TRAINER_S))
            await trainer.do("keep_rows", writer=writer, writers=_WRITERS)
            trainers.append(trainer)
        for number in results.rounds(pushes, f"push from {_WRITERS} processes"):
            await asyncio.gather(*(trainer.do("change") for trainer in trainers))
            facts = {"address": address, "key": f"sharded/{number}", "writers": _WRITERS}
            begin = time.perf_counter()
            pushed = await asyncio.gather(
                *(t.do("push_rows", writer=at, **facts) for at, t in enumerate(trainers))
            )
            seconds = time.perf_counter() - begin
            ways = {one["way"] for one in pushed}
            if len({one["content_digest"] for one in pushed}) > 1 or ways != {"same_host"}:
                msg = f"the pushes of several processes made {pushed}"
                raise RuntimeError(msg)
            if number >= _WARM_UP:
                results.add(**{key: pushed[0]["size_bytes"] / 1e9 / seconds})


def _floor(results: Results, folder: Path, size: int, rounds: int) -> None:
    with mmap.mmap(-1, size) as memory:
        view = memoryview(memory)
        for page in range(0, size, mmap.PAGESIZE):
            view[page] = 1
        with floor_client(folder, f"unix:{folder}/floor.sock", view, _SHARDS) as send:
            for number in results.rounds(1 + rounds, "bare gRPC stream"):
                gbps = send()
                if number:
                    results.add(grpc_floor_gbps=gbps)
        view.release()
