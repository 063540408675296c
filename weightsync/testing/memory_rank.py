"""One rank of the in-memory engine: its parameters, and what a worker of vLLM does with them."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from weightsync.model.digest import tensor_digest
from weightsync.model.layout import parse_header, unlike
from weightsync.shm.live_views import DOCUMENT, LiveBox, LiveViews
from weightsync.shm.live_writers import LiveWriters
from weightsync.shm.segment_socket import SegmentClient, file_of
from weightsync.shm.segments import MappedSegment, Segment
from weightsync.shm.staged_version import read_document
from weightsync.shm.status_page import PageWriter

#: Where each tensor begins, bytes.
_ALIGNMENT = 64


class SharedTensors(MutableMapping[str, bytes]):
    """Name to bytes, which lie one behind the other in a segment; their sizes stay.

    `writers` are who else has them.
    """

    def __init__(self, tensors: Mapping[str, bytes]) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        end = 0
        for name, data in tensors.items():
            self._places[name] = end, len(data)
            end += -(-len(data) // _ALIGNMENT) * _ALIGNMENT
        self._segment = Segment.create(end)
        segment = self._segment
        self.writers = LiveWriters(lambda: (segment,))
        weakref.finalize(self, self._segment.close)
        for name, data in tensors.items():
            self[name] = data

    def __getitem__(self, name: str) -> bytes:
        """Return a copy of what lies there now."""
        begin, size = self._places[name]
        return bytes(self._segment.view[begin : begin + size])

    def __setitem__(self, name: str, data: bytes) -> None:
        begin, size = self._places[name]
        self._segment.view[begin : begin + size] = data

    def __delitem__(self, name: str) -> None:
        """No parameter can go."""
        raise TypeError(f"{name} is a parameter of the model, which stays")

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def hand_out(
        self,
        socket: str,
        offer: str,
        rank: str,
        checkpoint: str,
        kinds: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        writable: bool,
    ) -> None:
        """Send what opens the memory over the segment socket, as a rank of vLLM does.

        `offer` is what the server expects, `rank` is `dp/pp/tp`, and `kinds` has dtype and shape by
        name. `writable`: it can be written at any time, as older releases want it.
        """
        boxes = tuple(self._box(name, *kind) for name, kind in kinds.items())
        document = LiveViews(rank, b"", checkpoint, {}, boxes).to_json()
        with (
            file_of(DOCUMENT, document) as file,
            self.writers.files(writable=writable) as memory,
            SegmentClient(socket) as client,
        ):
            client.offer(f"{offer}/{rank}", [file, *memory])

    def _box(self, name: str, dtype: str, shape: tuple[int, ...]) -> LiveBox:
        nowhere, begin = (0,) * len(shape), self._places[name][0]
        return LiveBox(name, dtype, dtype, shape, nowhere, shape, _dense(shape), 0, begin)


def _dense(shape: tuple[int, ...]) -> tuple[int, ...]:
    stride, size = [], 1
    for length in reversed(shape):
        stride.append(size)
        size *= length
    return tuple(reversed(stride))


#: Tensors named in one refusal.
_NAMES = 10
#: What a rank of vLLM does one after the other, and a switch.
_IN_TURN = frozenset({"weightsync_commit", "weightsync_state", "weightsync_release"})


class _MisfitError(ValueError):
    """Tensors that are not those of the model."""

    def __init__(self, message: str, names: list[str]) -> None:
        super().__init__(message)
        self.names = names


def _refused(error: _MisfitError) -> dict[str, Any]:
    named = {"names": error.names[:_NAMES], "names_total": len(error.names)}
    return {"error": str(error), "refused": True, **named}


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

    def patch(self, live: str) -> dict[str, bytes] | None:
        """Return the tensors to write if the version of that digest is live; None: all of them."""
        if not live or live != self.base:
            return None
        return {name: self.tensors[name] for name in self.changed}


class MemoryRank:
    """Holds a whole model, proves it by digests and writes versions into it.

    Args:
        name: "dp/pp/tp", as the server's reports name it.
        tensors: The checkpoint: name to (safetensors dtype, shape in elements, bytes).
        segment_socket: The server's segment socket.
        generates: Tells whether the engine generates, so that nothing may be written.
        attachable: Whether they are in shared memory, for trainers that attach.
        checkpoint: What these are to report as loaded.

    Attributes:
        live: The live parameters: name to bytes. Tests read them, and damage them.
        turn: Taken by whatever reads or writes them.
    """

    def __init__(
        self,
        name: str,
        tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
        segment_socket: str | Path,
        generates: Callable[[], bool],
        *,
        attachable: bool = False,
        checkpoint: str = "memory",
    ) -> None:
        self.name = name
        self._attachable = attachable
        self._checkpoint = checkpoint
        self._socket = str(segment_socket)
        self._generates = generates
        self._kinds = {name: (dtype, shape) for name, (dtype, shape, _) in tensors.items()}
        self.live = self._memory_of({name: data for name, (_, _, data) in tensors.items()})
        self._prepared: dict[str, _Prepared] = {}
        # What the parameters were last proved to hold, and whether a write was not proved.
        self._content, self._dirty = "", False
        self._touched = False
        #: Of what a trainer has written, until it is compared with a version.
        self._digests: dict[str, str] = {}
        self.turn = threading.Lock()

    @property
    def touched(self) -> bool:
        """Whether any process has written since it began."""
        return self._touched or self._dirty

    @property
    def content_digest(self) -> str:
        """What the parameters were last proved to hold; empty: nothing."""
        return self._content

    def write(self, tensors: Mapping[str, bytes]) -> None:
        """Put bytes into the live parameters; a test overrides this to write wrongly."""
        self.live.update(tensors)

    async def call(self, method: str, args: Mapping[str, Any]) -> dict[str, Any]:
        """Do what a worker method does."""
        work = partial(getattr(self, f"_{method.removeprefix('weightsync_')}"), args)
        return await self._answer(partial(self._in_turn, work) if method in _IN_TURN else work)

    async def place(self, prepared_id: str, apply_id: str) -> dict[str, Any]:
        """Write a prepared version in the switch of an apply between two steps."""
        work = partial(self._place, prepared_id, apply_id)
        return await self._answer(partial(self._in_turn, work))

    def become(self, tensors: Mapping[str, bytes]) -> None:
        """Hold these parameters, and know nothing else, as after a crash of vLLM."""
        self.live = self._memory_of(tensors)
        self._prepared, self._content, self._dirty = {}, "", False
        self._touched = False

    def _memory_of(self, tensors: Mapping[str, bytes]) -> MutableMapping[str, bytes]:
        return SharedTensors(tensors) if self._attachable else dict(tensors)

    async def _answer(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        reply = {"ok": True, "rank": self.name, "error": ""}
        try:
            return reply | await asyncio.to_thread(work)
        except _MisfitError as error:
            return reply | {"ok": False} | _refused(error)
        except (LookupError, ValueError, OSError, EOFError) as error:
            return reply | {"ok": False, "error": str(error)}

    def _in_turn(self, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        # Also after a caller that has gone away, whose call goes on.
        with self.turn:
            return work()

    # The worker methods.

    def _state(self, args: Mapping[str, Any]) -> dict[str, Any]:
        del args
        known = {"content_digest": self._content, "dirty": self._dirty, "written": self.touched}
        return known | self._writers()

    def _writers(self) -> dict[str, Any]:
        return self.live.writers.state() if isinstance(self.live, SharedTensors) else {}

    def _check(self, args: Mapping[str, Any]) -> dict[str, Any]:
        layout = read_document(self._socket, str(args["document"])).manifest.layout
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in layout.tensors}
        if extra := sorted(found.keys() - self._kinds.keys()):
            raise _MisfitError(f"push this model: tensor {extra[0]} is extra", extra)
        if args.get("whole"):
            self._check_fit(found)
        self._check_kinds(found)
        return {}

    def _prepare(self, args: Mapping[str, Any]) -> dict[str, Any]:
        report: dict[str, Any] = {"ticket": args["ticket"], "phase": "ready", "error": ""}
        try:
            prepared = self._read(str(args["document"]))
        except _MisfitError as error:
            report |= {"phase": "failed"} | _refused(error)
        except ValueError as error:
            report |= {"phase": "failed", "error": str(error), "refused": True}
        else:
            self._base(prepared, str(args.get("base", "")))
            report |= self._ready(prepared, args)
        self._tell(str(args["page"]), report)
        return {}

    def _read(self, document: str) -> _Prepared:
        staged = read_document(self._socket, document)
        layout = staged.manifest.layout
        found = {tensor.name: (tensor.dtype, tensor.shape) for tensor in layout.tensors}
        self._check_fit(found)
        prepared = _Prepared(staged.manifest.content_digest)
        with SegmentClient(self._socket) as client:
            shards = [MappedSegment(*each) for each in client.map(staged.segments)]
        for group, mapped in zip(layout.by_shard, shards, strict=True):
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
                f"push this model: tensor {name} is {'extra' if name in found else 'missing'}",
                others,
            )
        self._check_kinds(found)

    def _check_kinds(self, found: Mapping[str, tuple[str, tuple[int, ...]]]) -> None:
        if wrong := [name for name, kind in found.items() if kind != self._kinds[name]]:
            name = wrong[0]
            clause = unlike(name, found[name], self._kinds[name])
            raise _MisfitError(f"push this model: {clause}", wrong)

    def _base(self, prepared: _Prepared, apply_id: str) -> None:
        base = self._prepared.get(apply_id)
        if base is None or self._dirty or base.content_digest != self._content:
            return
        changed = {name for name, data in prepared.tensors.items() if base.tensors[name] != data}
        if 2 * sum(len(prepared.tensors[name]) for name in changed) < prepared.size:
            prepared.base, prepared.changed = base.content_digest, frozenset(changed)

    def _ready(self, prepared: _Prepared, args: Mapping[str, Any]) -> dict[str, Any]:
        self._prepared[str(args["apply_id"])] = prepared
        compare_live = bool(args["compare_live"])
        wrong = self._differing(prepared.tensors) if compare_live else []
        if compare_live and not wrong and not args.get("proof_only"):
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
        prepared = self._known(args)
        if self._generates():
            raise ValueError("the engine generates; pause it before a commit")
        return self._write(prepared, str(args["apply_id"]))

    def _place(self, prepared_id: str, apply_id: str) -> dict[str, Any]:
        return self._write(self._prepared[prepared_id], apply_id)

    def _write(self, prepared: _Prepared, apply_id: str) -> dict[str, Any]:
        patch = prepared.patch("" if self._dirty else self._content)
        tensors = prepared.tensors if patch is None else patch
        self._content, self._dirty, self._digests = "", True, {}
        self._touched = True
        failure = ""
        try:
            self.write(tensors)
        except OSError as error:
            failure = str(error)
        wrong = self._differing(tensors)
        if not wrong and not failure:
            self._content, self._dirty = prepared.content_digest, False
        return {
            "apply_id": apply_id,
            "content_digest": self._content,
            "written_bytes": sum(map(len, tensors.values())),
            "patched": patch is not None,
            "error": failure or (f"{wrong[0]} does not hold what was written" if wrong else ""),
            "ok": not wrong and not failure,
        }

    def _known(self, args: Mapping[str, Any]) -> _Prepared:
        apply_id = str(args["apply_id"])
        if apply_id not in self._prepared:
            raise ValueError(f"apply {apply_id} is not prepared on this rank; prepare it first")
        return self._prepared[apply_id]

    def _verify(self, args: Mapping[str, Any]) -> dict[str, Any]:
        prepared = self._known(args)
        now = self._live_digests()
        before = self._digests or now
        wrong = [name for name, digest in now.items() if digest != before[name]]
        wrong = wrong or self._differing(prepared.tensors)
        self._digests = {}
        self._content, self._dirty = ("", True) if wrong else (prepared.content_digest, False)
        report = {"phase": "ready", "proved": not wrong, "mismatched": wrong}
        report["holders"] = self._writers().get("holders", [])
        self._tell(str(args["page"]), {"ticket": args["ticket"], **report})
        return {}

    def _unprove(self, _: Mapping[str, Any]) -> dict[str, Any]:
        self._content, self._dirty, self._digests = "", True, {}
        self._touched = True
        return {}

    def _digest(self, args: Mapping[str, Any]) -> dict[str, Any]:
        self._known(args)
        writing = bool(self._writers().get("writing"))
        self._content, self._dirty = str(args["name"]), False
        self._digests = self._live_digests()
        return {
            "apply_id": str(args["apply_id"]),
            "content_digest": self._content,
            "writing": writing,
            "parts": self._digests if args.get("parts") else {},
        }

    def _live_digests(self) -> dict[str, str]:
        return {name: tensor_digest(data).hex() for name, data in self.live.items()}

    def _attach(self, args: Mapping[str, Any]) -> dict[str, Any]:
        report: dict[str, Any] = {"ticket": args["ticket"], "phase": "ready", "error": ""}
        if isinstance(self.live, SharedTensors):
            self._hand_out(self.live, args)
        else:
            error = "this engine was made without attachable=True"
            report |= {"phase": "failed", "error": error, "refused": True}
        self._tell(str(args["page"]), report)
        return {}

    def _hand_out(self, live: SharedTensors, args: Mapping[str, Any]) -> None:
        offer, access = str(args.get("offer", "")), str(args.get("access", ""))
        if "holder" in args:
            live.writers.remember(args, self._socket)
        elif access == "write":
            live.writers.open_block(self._socket, f"{offer}/{self.name}")
        else:
            facts = self._checkpoint, self._kinds
            live.hand_out(self._socket, offer, self.name, *facts, writable=access != "read")

    def _tell(self, page: str, report: Mapping[str, Any]) -> None:
        with SegmentClient(self._socket) as client:
            ((fd, _),) = client.map([f"{page}/{self.name}"])
        writer = PageWriter(fd)
        writer.write(report)
        writer.close()

    def _release(self, args: Mapping[str, Any]) -> dict[str, Any]:
        keep = set(args["keep"])
        self._prepared = {key: value for key, value in self._prepared.items() if key in keep}
        # It has copied what it prepared.
        return {"mapped": []}
