"""An engine that holds its parameters in a dictionary and talks to a real server.

It maps segments, matches names, dtypes and shapes, copies, or only the tensors that differ from the
live version where those are few, digests what it holds and keeps the pause states of a real engine,
so that a user's trainer or controller can be tested in milliseconds. It generates no tokens.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import tempfile
import threading
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from weightsync.digest import tensor_digest
from weightsync.engine import (
    BETWEEN_STEPS,
    LAYOUT_CHECK,
    EngineHealth,
    EngineInfo,
    EngineState,
    Lease,
    PauseSpec,
    SwitchOrder,
    SwitchOutcome,
)
from weightsync.errors import Reason, WeightSyncError
from weightsync.handover import SegmentClient
from weightsync.layout import build_header, parse_header
from weightsync.pages import PageWriter
from weightsync.segments import MappedSegment
from weightsync.staged import StagedVersion

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

__all__ = ["MemoryEngine"]

_RANK = "0/0/0"
#: Tensors named in one refusal.
_NAMES = 10
#: What a rank of vLLM does one after the other, and a switch.
_IN_TURN = frozenset({"weightsync_commit", "weightsync_state", "weightsync_release"})
_Given = TypeVar("_Given")


class _MisfitError(ValueError):
    """Tensors that are not those of the model."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


def _refused(error: _MisfitError) -> dict[str, Any]:
    told = {"names": error.names[:_NAMES], "names_total": len(error.names)}
    return {"error": str(error), "refused": True, **told}


@dataclass
class _Prepared:
    content_digest: str
    tensors: dict[str, bytes] = field(default_factory=dict)
    #: Content digest of what must be live for `changed` to be enough; "": nothing is enough.
    base: str = ""
    #: Names of the tensors that differ from it.
    changed: frozenset[str] = frozenset()

    @property
    def size(self) -> int:
        """Bytes of all tensors."""
        return sum(map(len, self.tensors.values()))

    def patch(self, held: str) -> dict[str, bytes] | None:
        """Return the tensors to write if `held` is live; None: all of them."""
        if not held or held != self.base:
            return None
        return {name: self.tensors[name] for name in self.changed}


class MemoryEngine:
    """Implements `weightsync.engine.Engine` in this process, with one rank.

    Args:
        tensors: The checkpoint: name to (safetensors dtype, shape in elements, bytes).
        segment_socket: The server's segment socket.
    """

    def __init__(
        self,
        tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
        segment_socket: str | Path,
    ) -> None:
        self._socket = str(segment_socket)
        self._kinds = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
        #: The live parameters: name to bytes. Tests read them, and damage them.
        self.live = {name: data for name, (_, _, data) in tensors.items()}
        self._prepared: dict[str, _Prepared] = {}
        # What the parameters were last proved to hold, and whether a write was not proved.
        self._content, self._dirty = "", False
        self._lease = ""
        self._turn = threading.Lock()
        self._condition, self._reason = EngineState.UNRECONCILED, "no server yet"
        self._engine_id = secrets.token_hex(8)
        #: The version that the last resume named; 0: none.
        self.version = 0
        #: What was done, in order: pause, commit, resume, switch, fence.
        self.events: list[str] = []

    async def hello(self) -> EngineInfo:
        """Tell what the engine is."""
        return EngineInfo(
            engine_id=self._engine_id,
            vllm_version="none",
            ranks=(_RANK,),
            capabilities=frozenset({"weight_version", BETWEEN_STEPS, LAYOUT_CHECK}),
            refusals=(),
            state=self._condition,
            reason=self._reason,
            model="memory",
            kind="memory",
        )

    async def pause(self, spec: PauseSpec, lease_s: float) -> Lease:
        """Stand still."""
        del lease_s
        if self._lease:
            raise WeightSyncError(Reason.APPLY_BUSY, "another apply has paused this engine")
        self.events.append("pause")
        self._lease = secrets.token_hex(8)
        if self._condition is EngineState.SERVING:
            self._condition = EngineState.PAUSED
        return Lease(self._lease, spec.mode)

    async def renew(self, lease_id: str, lease_s: float) -> None:
        """Prolong; leases never run out here."""
        del lease_s
        self._check_lease(lease_id)

    async def resume(self, lease_id: str, version: int, content_digest: str) -> bool:
        """Serve a version that the parameters were proved to hold."""
        self._check_lease(lease_id)
        if content_digest != self._content:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, f"the engine holds {self._content or 'nothing proved'}"
            )
        self.events.append("resume")
        self._lease, self.version = "", version
        self._condition, self._reason = EngineState.SERVING, ""
        return True

    async def switch(self, order: SwitchOrder) -> SwitchOutcome:
        """Write a version and prove it, or put the base back, or be fenced."""
        self.events.append("switch")
        if self._condition is not EngineState.SERVING or self._content != order.base_digest:
            raise WeightSyncError(
                Reason.ENGINE_REFUSED, f"the engine does not serve {order.base_digest}"
            )
        reply = {"ok": True, "rank": _RANK, "error": ""}
        try:
            reply |= await asyncio.to_thread(self._in_turn, self._switched, order)
        except LookupError as error:
            reply |= {"ok": False, "error": str(error)}
        if self._content == order.content_digest:
            self.version = order.version
        if not self._content:
            await self.fence("nobody knows what the parameters hold after a switch")
        return SwitchOutcome([reply], self._content, label_set=True)

    async def fence(self, reason: str) -> None:
        """Stand still for a reason."""
        self.events.append("fence")
        self._lease = ""
        self._condition, self._reason = EngineState.FENCED, reason

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Do what a worker method does."""
        work = getattr(self, f"_{method.removeprefix('weightsync_')}")
        if method in _IN_TURN:
            work = partial(self._in_turn, work)
        reply = {"ok": True, "rank": _RANK, "error": ""}
        try:
            return [reply | await asyncio.to_thread(work, args)]
        except _MisfitError as error:
            return [reply | {"ok": False} | _refused(error)]
        except (LookupError, ValueError, OSError, EOFError) as error:
            return [reply | {"ok": False, "error": str(error)}]

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        """Offer the present parameters as one safetensors file."""
        del segment_socket
        header, _ = build_header((name, *kind) for name, kind in self._kinds.items())
        with tempfile.TemporaryFile() as file:
            file.write(len(header).to_bytes(8, "little") + header)
            file.writelines(self.live.values())
            file.flush()
            offered = ("model.safetensors", os.fstat(file.fileno()).st_size, file.fileno())
            with SegmentClient(self._socket) as client:
                await asyncio.to_thread(client.offer, offer_id, [offered])
        return ["model.safetensors"]

    async def health(self) -> EngineHealth:
        """Tell how the engine is."""
        return EngineHealth(self._condition, self._reason, self._engine_id)

    async def close(self) -> None:
        """Nothing to let go of."""

    def restart(self, tensors: Mapping[str, bytes]) -> None:
        """Become a fresh engine with these parameters, as after a crash of vLLM."""
        self.live = dict(tensors)
        self._prepared, self._content, self._lease = {}, "", ""
        self._dirty = False
        self._condition, self._reason = EngineState.UNRECONCILED, "restarted"
        self._engine_id = secrets.token_hex(8)

    def _check_lease(self, lease_id: str) -> None:
        if lease_id != self._lease:
            raise WeightSyncError(Reason.ENGINE_REFUSED, f"lease {lease_id!r} is not held")

    def _in_turn(self, work: Callable[[_Given], dict[str, Any]], given: _Given) -> dict[str, Any]:
        # Also after a caller that has gone away, whose call goes on.
        with self._turn:
            return work(given)

    # The worker methods.

    def _state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        del args
        return {"content_digest": self._content, "dirty": self._dirty}

    def _check(self, args: Mapping[str, Any]) -> dict[str, Any]:
        with SegmentClient(self._socket) as client:
            ((fd, size),) = client.map([str(args["document"])])
        layout = StagedVersion.from_view(MappedSegment(fd, size).view).manifest.layout
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in layout.tensors}
        if extra := sorted(found.keys() - self._kinds.keys()):
            raise _MisfitError(f"tensor {extra[0]} is extra; push this model", extra)
        self._check_kinds(found)
        return {}

    def _prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        with SegmentClient(self._socket) as client:
            ((page_fd, _),) = client.map([f"{args['page']}/{_RANK}"])
            page = PageWriter(page_fd)
            report: dict[str, Any] = {"ticket": args["ticket"], "phase": "ready", "error": ""}
            try:
                prepared = self._read(client, str(args["document"]))
            except _MisfitError as error:
                report |= {"phase": "failed"} | _refused(error)
            except ValueError as error:
                report |= {"phase": "failed", "error": str(error), "refused": True}
            else:
                self._base(prepared, str(args.get("base", "")))
                report |= self._ready(str(args["apply_id"]), prepared, bool(args["compare_live"]))
        page.write(report)
        page.close()
        return {}

    def _read(self, client: SegmentClient, document: str) -> _Prepared:
        ((fd, size),) = client.map([document])
        staged = StagedVersion.from_view(MappedSegment(fd, size).view)
        layout = staged.manifest.layout
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in layout.tensors}
        self._check_fit(found)
        prepared = _Prepared(staged.manifest.content_digest)
        for group, segment_id in zip(layout.by_shard, staged.segments, strict=True):
            ((fd, size),) = client.map([segment_id])
            mapped = MappedSegment(fd, size)
            start = 8 + int.from_bytes(mapped.view[:8], "little")
            parse_header(mapped.view[8:start])
            for tensor in group:
                prepared.tensors[tensor.name] = bytes(
                    mapped.view[start + tensor.begin : start + tensor.end]
                )
        return prepared

    def _check_fit(self, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        if others := sorted(found.keys() ^ self._kinds.keys()):
            name = others[0]
            raise _MisfitError(
                f"tensor {name} is {'extra' if name in found else 'missing'}; push this model",
                others,
            )
        self._check_kinds(found)

    def _check_kinds(self, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        if wrong := [name for name, kind in found.items() if kind != self._kinds[name]]:
            name = wrong[0]
            raise _MisfitError(
                f"tensor {name} is {found[name]}, the model has {self._kinds[name]}; "
                "push this model",
                wrong,
            )

    def _base(self, prepared: _Prepared, apply_id: str) -> None:
        base = self._prepared.get(apply_id)
        if base is None or self._dirty or base.content_digest != self._content:
            return
        changed = {name for name, data in prepared.tensors.items() if base.tensors[name] != data}
        if 2 * sum(len(prepared.tensors[name]) for name in changed) < prepared.size:
            prepared.base, prepared.changed = base.content_digest, frozenset(changed)

    def _ready(self, apply_id: str, prepared: _Prepared, compare_live: bool) -> dict[str, Any]:  # noqa: FBT001 - a wire field
        self._prepared[apply_id] = prepared
        wrong = self._differing(prepared.tensors) if compare_live else []
        if compare_live and not wrong:
            self._content, self._dirty = prepared.content_digest, False
        patch = prepared.patch(self._content)
        return {
            "bytes": prepared.size if patch is None else sum(map(len, patch.values())),
            "patched": patch is not None,
            "proved": not wrong if compare_live else None,
            "mismatched": wrong[:10],
        }

    def _differing(self, tensors: Mapping[str, bytes]) -> list[str]:
        return [
            name
            for name, data in tensors.items()
            if tensor_digest(self.live[name]) != tensor_digest(data)
        ]

    def _commit(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self.events.append("commit")
        prepared = self._known(args)
        if self._condition is EngineState.SERVING:
            raise ValueError("the engine generates; pause it before a commit")
        return self._write(prepared, str(args["apply_id"]))

    def _switched(self, order: SwitchOrder) -> dict[str, Any]:
        target, base = self._prepared[order.apply_id], self._prepared[order.base_id]
        reply = self._write(target, order.apply_id)
        if reply["ok"]:
            return reply
        back = self._write(base, order.apply_id)
        return back | {"ok": False, "error": f"{reply['error']}; {back['error']}".rstrip("; ")}

    def _write(self, prepared: _Prepared, apply_id: str) -> dict[str, Any]:
        patch = prepared.patch("" if self._dirty else self._content)
        tensors = prepared.tensors if patch is None else patch
        self._content, self._dirty = "", True
        self.write(tensors)
        wrong = self._differing(tensors)
        if not wrong:
            self._content, self._dirty = prepared.content_digest, False
        return {
            "apply_id": apply_id,
            "content_digest": self._content,
            "written_bytes": sum(map(len, tensors.values())),
            "patched": patch is not None,
            "error": f"{wrong[0]} does not hold what was written" if wrong else "",
            "ok": not wrong,
        }

    def _known(self, args: Mapping[str, Any]) -> _Prepared:
        apply_id = str(args["apply_id"])
        if apply_id not in self._prepared:
            raise ValueError(f"apply {apply_id} is not prepared on this rank; prepare it first")
        return self._prepared[apply_id]

    def write(self, tensors: Mapping[str, bytes]) -> None:
        """Put bytes into the live parameters; a test overrides this to write wrongly."""
        self.live.update(tensors)

    def _verify(self, args: Mapping[str, Any]) -> dict[str, Any]:
        wrong = self._differing(self._known(args).tensors)
        if wrong:
            self._content, self._dirty = "", True
        with SegmentClient(self._socket) as client:
            ((fd, _),) = client.map([f"{args['page']}/{_RANK}"])
        page = PageWriter(fd)
        page.write(
            {"ticket": args["ticket"], "phase": "ready", "proved": not wrong, "mismatched": wrong}
        )
        page.close()
        return {}

    def _release(self, args: Mapping[str, Any]) -> dict[str, Any]:
        keep = set(args["keep"])
        self._prepared = {key: value for key, value in self._prepared.items() if key in keep}
        # It has copied what it prepared.
        return {"mapped": []}
