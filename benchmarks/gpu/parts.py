"""The parts: what each starts, and what it measures in it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from benchmarks.durable import filesystem
from benchmarks.gpu import limits
from benchmarks.gpu.between import measure_between
from benchmarks.gpu.checkpoint import roomy, write_checkpoint
from benchmarks.gpu.cleanup import scratch
from benchmarks.gpu.colocated import Colocated
from benchmarks.gpu.engine import Setup, Site, generating, plugins_on_path
from benchmarks.gpu.link import TrainerLink, training
from benchmarks.gpu.model_parts import measure_kind, measure_kinds
from benchmarks.gpu.moe30 import measure_moe30
from benchmarks.gpu.order import Order, needs_gpus, sockets, take_limits
from benchmarks.gpu.ours import Ours, serving
from benchmarks.gpu.pause import measure_pauses
from benchmarks.gpu.peers import Peers
from benchmarks.gpu.push import measure_hand_offs, measure_streams
from benchmarks.gpu.results import Results
from benchmarks.gpu.trainer import ATTACHED

__all__ = ["PARTS", "Order"]

_TRAINER_S = 120.0
#: Where a durable store lies; a symbolic link leads it to another disk.
_DISK = Path("build/bench")
#: Layers of what the push part streams, at a tenth of the speed of what it hands over.
_STREAM_LAYERS = 4


Part = Callable[[Order, Results], Coroutine[Any, Any, None]]


@dataclass(frozen=True)
class _Room:
    """What the parts with an engine have: a checkpoint, files to write, and a trainer."""

    folder: Path
    base: Path
    files: Path
    site: Site
    trainer: TrainerLink


async def _limits(order: Order, results: Results) -> None:
    limits.measure(results, order.shape, order.device, order.rounds)


async def _pause(order: Order, results: Results) -> None:
    async with _room(order, results) as room, room.site.load.running():
        await measure_pauses(room.site, 2 * order.rounds)


async def _peers(order: Order, results: Results) -> None:
    backend = _ipc_backend(order, results)
    async with _room(order, results, backend=backend) as room, room.site.load.running():
        with results.attempt("pauses"):
            await measure_pauses(room.site, order.rounds, clear=False)
        peers = Peers(room.site, room.trainer, room.files, order.rounds)
        await peers.without_backend()
        if backend:
            await peers.ipc()


async def _colocated(order: Order, results: Results) -> None:
    backend = _ipc_backend(order, results)
    # On a CPU alone parameters are not in memory that can be shared.
    shared = {"WEIGHTSYNC_ATTACH": "1"}
    async with (
        _room(order, results, backend=backend, variables=shared) as room,
        room.site.load.running(),
    ):
        with results.attempt("pauses"):
            await measure_pauses(room.site, order.rounds, clear=False)
        if backend:
            await Peers(room.site, room.trainer, room.files, order.rounds).ipc()
            await _reload(room)
        address = f"unix:{room.folder}/push.sock"
        async with (
            serving(room.site, room.folder, "memory://", "--slots", "3") as client,
            training(ATTACHED, Path(address), _TRAINER_S) as attached,
        ):
            ours = Ours(room.site, room.trainer, client, address, room.files, order.rounds)
            colocated = Colocated(ours, attached)
            await colocated.pushed()
            await colocated.device()
            await colocated.in_place()
            await ours.prove()


async def _reload(room: _Room) -> None:
    """Have the engine hold its checkpoint again."""
    await room.site.calls.pause("keep", clear_cache=False)
    try:
        where = {"weights_path": str(room.base)}
        await room.site.llm.collective_rpc("reload_weights", kwargs=where)
    finally:
        await room.site.calls.resume()


def _ipc_backend(order: Order, results: Results) -> str:
    """Return vLLM's ipc backend if it can be measured here; "": it cannot."""
    if order.device != "cuda":
        return ""
    if importlib.util.find_spec("ray") is None:
        # vLLM 0.26 imports it with this backend, and would not start.
        results.errors.append("vllm_ipc: vLLM's ipc backend imports ray, which is not installed")
        return ""
    return "ipc"


async def _nccl(order: Order, results: Results) -> None:
    needs_gpus(order, 2)
    async with (
        _room(order, results, backend="nccl", trainer="cuda:1") as room,
        room.site.load.running(),
    ):
        with results.attempt("pauses"):
            await measure_pauses(room.site, order.rounds, clear=False)
        await Peers(room.site, room.trainer, room.files, order.rounds).nccl(1)


def _apply(tp: int, cache: str = "keep", *, durable: bool = False, compiled: bool = False) -> Part:
    # What a store on disk or compilation changes is seen in the times of pushes and applies.
    short = cache != "keep" or durable or compiled

    async def part(order: Order, results: Results) -> None:
        if order.device == "cuda":
            needs_gpus(order, tp)
        with _store(results, durable=durable) as store:
            async with _room(order, results, tp=tp, compiled=compiled) as room:
                await measured(order, room, store)

    async def measured(order: Order, room: _Room, store: str) -> None:
        exact = cache != "keep"
        site, folder = room.site, room.folder
        async with serving(site, folder, store) as client, site.load.running():
            with site.results.attempt("pauses"):
                await measure_pauses(site, order.rounds, clear=exact)
            address = f"unix:{folder}/push.sock"
            ours = Ours(site, room.trainer, client, address, room.files, order.rounds, cache)
            await ours.full()
            if not exact:
                await ours.delta()
            if not short:
                await measure_between(ours)
                await ours.registered()
            await ours.prove()

    return part


async def _push(order: Order, results: Results) -> None:
    await take_limits(order, results)
    slim = replace(order.shape, layers=min(_STREAM_LAYERS, order.shape.layers))
    results.parameters |= {"bytes": order.shape.nbytes, "bytes_streamed": slim.nbytes}
    with scratch(roomy(order.shape.nbytes)) as place, sockets() as folder:
        plugins_on_path(folder)
        devices = ["cpu", *(["cuda"] if order.device == "cuda" else [])]
        for shape, measure in ((order.shape, measure_hand_offs), (slim, measure_streams)):
            results.say("writing a checkpoint")
            await asyncio.to_thread(write_checkpoint, place / measure.__name__, shape.spec)
            own = folder / measure.__name__
            own.mkdir()
            await measure(results, own, place / measure.__name__, devices, order.rounds)


PARTS: dict[str, Part] = {
    "limits": _limits,
    "pause": _pause,
    "peers": _peers,
    "nccl": _nccl,
    "apply": _apply(1),
    "exact": _apply(1, "recompute"),
    "durable": _apply(1, durable=True),
    "compiled": _apply(1, compiled=True),
    "apply2": _apply(2),
    "push": _push,
    "colocated": _colocated,
    "models": measure_kinds,
    "model": measure_kind,
    "moe30": measure_moe30,
}


@contextlib.asynccontextmanager
async def _room(
    order: Order,
    results: Results,
    *,
    tp: int = 1,
    backend: str = "",
    trainer: str = "",
    compiled: bool = False,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> AsyncIterator[_Room]:
    graphs = "vLLM's default, compiled" if compiled else "FULL_DECODE_ONLY"
    results.parameters |= {"requests": order.requests, "tp": tp, "cuda_graphs": graphs}
    results.parameters |= {"executor": order.executor}
    if order.device == "cpu":
        results.parameters["cuda_graphs"] = "none"
    await take_limits(order, results)
    results.parameters |= {
        "bytes": order.shape.nbytes,
        "bytes_per_rank": order.shape.nbytes // tp,
        "parameters": order.shape.elements,
        "tensors": len(order.shape.tensors),
    }
    place = roomy(2 * order.shape.nbytes)
    results.parameters["files_on"] = str(place)
    with scratch(place) as disk, sockets() as folder:
        plugins_on_path(folder)
        results.say("writing checkpoints")
        for name in ("base", "other"):
            await asyncio.to_thread(write_checkpoint, disk / name, order.shape.spec)
        setup = Setup(
            folder,
            disk / "base",
            order.device,
            tp,
            order.requests,
            backend,
            order.executor,
            compiled,
            variables=variables,
        )
        device = trainer or order.device
        async with (
            generating(setup, results) as site,
            training(device, disk / "base", _TRAINER_S) as link,
        ):
            yield _Room(folder, disk / "base", disk / "other", site, link)


@contextlib.contextmanager
def _store(results: Results, *, durable: bool) -> Iterator[str]:
    """Yield where the server keeps versions: nowhere, or on the disk of this checkout."""
    results.parameters["store"] = "memory://"
    if not durable:
        yield "memory://"
        return
    _DISK.mkdir(parents=True, exist_ok=True)
    with scratch(_DISK) as folder:
        results.parameters["store"] = f"file:// on {filesystem(folder)}"
        yield f"file://{folder.resolve()}"
