"""An engine that computes its parameters from a version when it loads it, beside generation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from tests.unit.server.engine.plant import Engine, tensors
from weightsync.engine import VERSION_LOADS
from weightsync.shm.segment_socket import SegmentClient
from weightsync.shm.segments import MappedSegment
from weightsync.shm.staged_version import StagedVersion
from weightsync.shm.status_page import PageWriter

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

__all__ = ["LoadingEngine"]


def _computed(pushed: bytes) -> bytes:
    """Return what becomes live of tensor `b`; of that it returns what was pushed."""
    return bytes(value ^ 0xFF for value in pushed)


class LoadingEngine(Engine):
    """Has a loader; until it is asked for a load, its versions are copies.

    Attributes:
        loaded: Content digests of what was loaded.
        go: Loads wait for it.
        why: Why there is no load plan, which a capture tells; empty: there is one.
        broken: What loaders die of; empty: they live.
        remedy: What would have to change for one.
        rescaled: Whether what is prepared reads a quantised cache by other scales.
        wrong_load: Whether loads come out otherwise than the engine's own.
    """

    def __init__(self, socket: Path, *, why: str = "", able: bool = True) -> None:
        super().__init__(socket)
        if able:
            self._abilities.add(VERSION_LOADS)
        self.live["b"] = _computed(self.live["b"])
        self.loaded: list[str] = []
        self.go = asyncio.Event()
        self.go.set()
        self.why = why
        self.remedy = ""
        self.rescaled = False
        self.broken = ""
        self.wrong_load = False
        self._captured = not why
        self._jobs: list[asyncio.Task[None]] = []

    @property
    def serves(self) -> int:
        """The seed of what it generates with; 0: it generates nothing."""
        if self._condition != "serving":
            return 0
        seed = self.live["a"][0]
        made = tensors(seed)
        assert self.live == made | {"b": _computed(made["b"])}, "a mixture is served"
        return seed

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> Any:
        live = self.live
        self.live = {**live, "b": _computed(live["b"])}
        try:
            return await super().offer_checkpoint(segment_socket, offer_id)
        finally:
            self.live = live

    async def call_workers(self, method: str, args: Any) -> Any:
        if method != "weightsync_load":
            return await super().call_workers(method, args)
        self._jobs.append(asyncio.create_task(self._load_later(args)))
        return [{"ok": True, "rank": self.name}]

    async def _load_later(self, args: Mapping[str, Any]) -> None:
        await self.go.wait()
        await super().call_workers("weightsync_load", args)

    def _state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        return super()._state(args) | {"transform": self._transform}

    @property
    def _transform(self) -> str:
        return "twin" if self.loaded else "plan"

    def _capture(self, args: Mapping[str, Any]) -> dict[str, Any]:
        del args
        self._captured = True
        why = {"why": self.why, "remedy": self.remedy}
        return {"transform": "twin", **why} if self.why else {}

    def _load(self, args: Mapping[str, Any]) -> dict[str, Any]:
        with SegmentClient(self._socket) as client:
            ((fd, size), (page, _)) = client.map(
                [str(args["document"]), f"{args['page']}/{self.name}"]
            )
        content = StagedVersion.from_view(MappedSegment(fd, size).view).manifest.content_digest
        writer = PageWriter(page)
        if self.broken:
            writer.write({"ticket": args["ticket"], "phase": "failed", "error": self.broken})
            writer.close()
            return {}
        self.loaded.append(content)
        writer.write(
            {
                "ticket": args["ticket"], "phase": "ready", "held": self.loaded[-2:],
                "load_s": 0.1, "arena_bytes": 64,
            }
        )  # fmt: skip
        writer.close()
        return {}

    def _prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        if self._captured:
            return super()._prepare(args)
        with SegmentClient(self._socket) as client:
            ((fd, _),) = client.map([f"{args['page']}/{self.name}"])
        page = PageWriter(fd)
        page.write({"ticket": args["ticket"], "phase": "needs_capture"})
        page.close()
        return {}

    def _read(self, document: str) -> Any:
        prepared = super()._read(document)
        if self.loaded:
            if prepared.content_digest not in self.loaded:
                raise ValueError("the version is not loaded on this rank any more")
            made = bytes(64) if self.wrong_load else _computed(prepared.tensors["b"])
            prepared.tensors["b"] = made
        return prepared

    def _ready(self, prepared: Any, args: Mapping[str, Any]) -> dict[str, Any]:
        told = {"transform": self._transform, "reads_cache_otherwise": self.rescaled}
        return super()._ready(prepared, args) | told
