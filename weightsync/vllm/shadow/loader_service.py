"""Loads versions in a loader's process, one request of its rank after the other."""

from __future__ import annotations

import contextlib
import gc
import os
import sys
import time
from typing import TYPE_CHECKING, Any

import torch

from weightsync import failpoints
from weightsync.shm.staged_version import read_document
from weightsync.vllm.apply.host_patch import row_digests, rows_of
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.shadow.arena import LoaderArena
from weightsync.vllm.shadow.loader_config import load_config
from weightsync.vllm.shadow.model_state import LoadFacts, ModelState
from weightsync.wire.documents import receive, send, send_fds

if TYPE_CHECKING:
    import socket

    from weightsync.vllm.apply.device_ops import DeviceOps
    from weightsync.vllm.apply.segment_mappings import SegmentMappings
    from weightsync.vllm.shadow.state_loads import StateLoads


#: Names of tensors in one message.
_NAMES = 10
#: How much the loader gives way to what generates, nice(2).
_NICE = 10


class LoaderService:
    def __init__(
        self,
        sock: socket.socket,
        loads: StateLoads,
        mappings: SegmentMappings,
        ops: DeviceOps,
        device: torch.device,
    ) -> None:
        self._sock = sock
        self._loads = loads
        self._mappings = mappings
        self._ops = ops
        self._device = device
        self._threads = SliceThreads(background_thread_count(device, 1))
        self._arenas: dict[int, LoaderArena] = {}

    def serve(self) -> None:
        """Serve until the rank is gone, or a load has failed."""
        while True:
            request = receive(self._sock)
            if request["op"] == "unmap":
                self._mappings.unmap(map(str, request["segments"]))
                self._send({"event": "unmapped"})
                continue
            self._load(request)
            # Only now does nothing hold what was loaded beside the arenas.
            gc.collect()
            if self._device.type == "cuda":
                torch.cuda.empty_cache()

    def _load(self, request: dict[str, Any]) -> None:
        begin = time.perf_counter()
        path = str(request["socket"])
        staged = read_document(path, str(request["document"]))
        failpoints.hit("loader.load")
        if request["same_as"] is not None:
            self._loads.expect(request["same_as"])
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        try:
            state = self._loads.state(path, staged)
        except PlanRefusedError as error:
            names = {"names": error.names[:_NAMES], "names_total": len(error.names)}
            self._send({"event": "refused", "error": str(error), **names})
            return
        failpoints.hit("loader.loaded")
        seconds = time.perf_counter() - begin
        others = {name: digest.hex() for name, digest in state.others.items()}
        facts = LoadFacts(others, self._loads.unread, self._loads.same_as).to_json()
        form = state.form.to_json()
        about = {"peak": self._peak(state), "numbers": dict(state.numbers)}
        self._send({"event": "loaded", "form": form, "seconds": seconds, **about, **facts})
        # The rank may be exchanging what lies in an arena.
        self._store(state, int(receive(self._sock)["arena"]))

    def _send(self, reply: dict[str, Any]) -> None:
        send(self._sock, {**reply, "mapped": sorted(self._mappings.ids)})

    def _peak(self, state: ModelState) -> int:
        """Return the bytes that the load took beside the arenas."""
        if self._device.type != "cuda":
            return sum(state.form.spans)
        arenas = sum(arena.nbytes for arena in self._arenas.values())
        return torch.cuda.max_memory_reserved(self._device) - arenas

    def _store(self, state: ModelState, index: int) -> None:
        made = index not in self._arenas
        if made:
            self._arenas[index] = LoaderArena(state.form.spans, self._device)
        arena = self._arenas[index]
        for place, piece in zip(arena.memory, state.memory, strict=True):
            place.copy_(piece)
        failpoints.hit("loader.stored")
        digests = row_digests(self._ops, rows_of(arena.memory), self._threads)
        if failpoints.lie("loader.digests"):
            digests = digests[::-1]
        document, fds = arena.share()
        reply: dict[str, Any] = {"event": "stored", "digests": [digest.hex() for digest in digests]}
        if made:
            reply |= {"arena": document, "fds": len(fds), "nbytes": arena.nbytes}
        self._send(reply)
        if made:
            send_fds(self._sock, fds)


def _ops_of(device: torch.device, room: int | None) -> DeviceOps:
    from weightsync.vllm.apply.host_ops import HostOps
    from weightsync.vllm.cuda.cuda_ops import CudaOps
    from weightsync.vllm.env import Amount

    if device.type != "cuda":
        return HostOps(device)
    total = torch.cuda.get_device_properties(device).total_memory
    if room is not None:
        torch.cuda.set_per_process_memory_fraction(min(1.0, room / total), device)
    return CudaOps(device, Amount(0), 0.0)


def begin(start: dict[str, Any], sock: socket.socket) -> LoaderService:
    """Return what serves the rank, when it can load; `start` is what the rank has sent first."""
    # Before any plugin runs, as in vLLM's own workers: they choose kernels by what they find.
    whole = load_config(sys.stdin.buffer)
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from weightsync.vllm.apply.parallel import leave_core
    from weightsync.vllm.apply.segment_mappings import SegmentMappings
    from weightsync.vllm.shadow.state_loads import StateLoads
    from weightsync.vllm.shadow.vllm_load import LoaderGroup, VllmLoad

    leave_core()
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    torch.set_num_threads(1)
    group = LoaderGroup(
        whole, start["rank"], start["local_rank"], start["rendezvous"], start["device"]
    )
    ops = _ops_of(group.device, start["room"])

    mappings, last = SegmentMappings(ops.registrar), ("", 0)

    def progress(phase: str, percent: int) -> None:
        nonlocal last
        # Thousands of tensors are no thousand messages; each load begins with 0.
        if not percent or (phase, percent) != last:
            last = phase, percent
            reply = {"event": "progress", "phase": phase, "percent": percent}
            # What it has mapped already counts, too: a load may be given up.
            send(sock, {**reply, "mapped": sorted(mappings.ids)})

    loads = StateLoads(VllmLoad(whole), ops, mappings, progress)
    # What was imported stays: vLLM collects garbage twice in each load.
    gc.collect()
    gc.freeze()
    return LoaderService(sock, loads, mappings, ops, group.device)
