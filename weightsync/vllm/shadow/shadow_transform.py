"""Versions through a loader beside this rank: what it loaded is exchanged with the live weights."""

from __future__ import annotations

import logging
import re
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.model.manifest import Layout, Manifest
from weightsync.vllm.apply.device_ops import DeviceOps, Stop
from weightsync.vllm.apply.parallel import SliceThreads, background_thread_count, yield_cores
from weightsync.vllm.apply.transform import NeedsLoadError, Prepared, TransformRequest
from weightsync.vllm.apply.writes import ParamWriter
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.load_watch import load_call
from weightsync.vllm.plan.model_parts import parts_of, shared_modules
from weightsync.vllm.shadow.arena import RankArena
from weightsync.vllm.shadow.live_state import ExchangedMemory, LoadedVersion
from weightsync.vllm.shadow.loader_config import ModelLoad, PartLoad, dump_config
from weightsync.vllm.shadow.loader_process import (
    LoaderError,
    LoaderProcess,
    LoaderRefusedError,
    LoaderStart,
)
from weightsync.vllm.shadow.model_state import (
    LoadFacts,
    ModelState,
    StateForm,
    check_numbers,
    check_same,
    state_of,
)

if TYPE_CHECKING:
    import torch

    #: Shows how far a load is.
    Report = Callable[[Mapping[str, Any]], None]


logger = logging.getLogger(__name__)


#: Least and most time of a load, as a multiple of the one before it; seconds.
_LEAST_S, _TIMES = 120.0, 3.0
#: How often a version is tried before it is refused.
_TRIES = 3
#: How often it is looked at whether a load is still wanted, seconds.
_LOOK_S = 0.2


@dataclass(frozen=True, eq=False)
class _ShadowPrepared:
    """See `Prepared`: it reads no segment any more."""

    apply_id: str
    version: LoadedVersion
    segments: tuple[str, ...] = ()

    @property
    def content_digest(self) -> str:
        return self.version.content_digest


@dataclass(frozen=True)
class _ShadowWriter:
    """See `ParamWriter`: an exchange, and a look at all that is live then."""

    memory: ExchangedMemory
    target: LoadedVersion
    patched = False
    compared_all = True

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def write(self, threads: SliceThreads) -> None:
        self.memory.write(self.target, threads)

    def verify(self, threads: SliceThreads) -> list[str]:
        return self.memory.unlike(self.target, threads)


@dataclass
class _Starts:
    """What is known of the loaders that were started; `group` is of the last one, or "".

    `over` is the group whose loaders were ended without a failure: no loader can be met there.
    `expected` is False if the next one is started because one has failed, which `restarts` counts.
    """

    group: str = ""
    over: str = ""
    expected: bool = True
    restarts: int = 0

    def note(self, group: str) -> None:
        self.restarts += not self.expected
        self.group, self.expected = group, False


@dataclass
class _Took:
    """What loads have taken: the last one its time, the largest one its bytes."""

    seconds: float = 0.0
    peak: int = 0


class ShadowTransform:
    """See `VersionTransform`. One load at a time; what a commit needs was loaded before it.

    `start` returns what a loader begins with, by its group. `room` returns how many bytes of the
    device it may take; None: it is not bounded. `fixed` says why the numbers with which vLLM calls
    kernels cannot be changed, with a remedy; "": they can.
    """

    name = "twin"

    def __init__(
        self,
        model: torch.nn.Module,
        device: torch.device,
        ops: DeviceOps,
        start: Callable[[str], LoaderStart],
        ranks: int,
        room: Callable[[], int | None],
        fixed: str = "",
    ) -> None:
        self._fixed = fixed
        self._model = model
        self._device = device
        self._ops = ops
        self._start = start
        self._room = room
        self._threads = SliceThreads(background_thread_count(device, ranks), yield_cores)
        self._loader: LoaderProcess | None = None
        self._memory: ExchangedMemory | None = None
        self._arenas: dict[int, RankArena] = {}
        #: Held by whoever waits for the loader's answers.
        self._asking = threading.Lock()
        self._took = _Took()
        self._starts = _Starts()
        #: Failures in a row, by content digest, and what the last one said.
        self._failed: dict[str, tuple[int, str]] = {}
        #: Layout of what was loaded first: the engine's own checkpoint.
        self._layout: Layout | None = None
        self._first: LoadFacts | None = None

    def is_of(self, args: Mapping[str, Any]) -> bool:
        """Whether the loader, if there is one, belongs to the group of a call."""
        return self._loader is None or self._starts.group == str(args["group"])

    def begin(self, args: Mapping[str, Any]) -> None:
        """Start a group's loader unless there is one, in the thread that never ends.

        Raises PlanRefusedError if there is no room for it, LoaderError if the group is over.
        """
        if self._memory is None:
            self._check_room()
        group = str(args["group"])
        if group == self._starts.over:
            msg = "the loaders of this group were ended; they are started in another one"
            raise LoaderError(msg)
        loader = self._loader
        if loader is not None and (group != self._starts.group or not loader.alive):
            self._end_loader(loader)
        if self._loader is None:
            self._make_room()
            self._loader = LoaderProcess(self._start(group))
            self._starts.note(group)
            logger.info("weightsync: loader %d starts", self._loader.pid)

    def status(self) -> dict[str, Any]:
        loader = self._loader
        return {
            "loader_up": loader is not None and loader.ready and loader.alive,
            "loader_restarts": self._starts.restarts,
            "arena_bytes": sum(arena.nbytes for arena in list(self._arenas.values())),
            "held": [version.content_digest for version in self._memory.versions]
            if self._memory is not None
            else [],
        }

    @property
    def mapped(self) -> frozenset[str]:
        loader = self._loader
        return loader.mapped if loader is not None else frozenset()

    def unmap(self, existing: frozenset[str]) -> None:
        """Have the loader, unless it loads, let go of segments that are gone; returns at once."""
        loader, gone = self._loader, self.mapped - existing
        if loader is not None and gone and not self._asking.locked():
            # Taking gigabytes from a device lasts longer than a step.
            threading.Thread(
                target=self._unmap, args=(loader, gone), name="weightsync", daemon=True
            ).start()

    def _unmap(self, loader: LoaderProcess, gone: frozenset[str]) -> None:
        if not self._asking.acquire(blocking=False):
            return
        try:
            loader.unmap(sorted(gone), _LEAST_S)
        except LoaderError:
            logger.exception("weightsync: the loader still holds memory that no longer exists")
            self._end_loader(loader)
        finally:
            self._asking.release()

    def unload(self) -> None:
        """End the loader and let go of what it has loaded; what is live stays. Nothing loads."""
        self._end_loader(self._loader)
        self._starts.expected, self._starts.over = True, self._starts.group
        self._drop_arenas()

    def _drop_arenas(self) -> None:
        if self._memory is not None:
            # An exchange may be under way on a device.
            self._ops.synchronize()
            self._memory.drop_arenas()
        arenas, self._arenas = self._arenas, {}
        for arena in arenas.values():
            arena.close()

    def load(
        self, manifest: Manifest, path: str, document: str, stop: Stop, report: Report
    ) -> dict[str, Any]:
        """Load a version, unless it lies here; return what the report tells.

        Raises PlanRefusedError if the model cannot take it, or it has failed too often. After a
        LoaderError the loader is gone.
        """
        content_digest = manifest.content_digest
        if self._memory is not None and self._memory.has_proved(content_digest):
            self._memory.check_unmoved(self._live_state())
            return {"phase": "ready", "held_before": True, **self.status()}
        count, why = self._failed.get(content_digest, (0, ""))
        if count >= _TRIES:
            msg = f"this version could not be loaded {count} times ({why}); push another one"
            raise PlanRefusedError(msg)
        if self._layout is not None:
            # A loader that is new has nothing with which it could compare what it loads first.
            check_same(manifest.layout, self._layout)
        begin = time.perf_counter()
        self._ask(stop)
        loader = self._loader
        try:
            self._load(loader, content_digest, path, document, stop, report)
            self._layout = self._layout or manifest.layout
        except LoaderRefusedError as error:
            raise PlanRefusedError(str(error), error.names) from error
        except BaseException as error:
            # It waits for what comes after a load.
            self._end_loader(loader)
            if isinstance(error, PlanRefusedError) or not isinstance(error, Exception):
                raise
            kind = "" if isinstance(error, LoaderError) else f"{type(error).__name__}: "
            text = f"{kind}{error}"
            if not stop():
                self._failed[content_digest] = count + 1, text
            raise LoaderError(text) from error
        finally:
            self._asking.release()
        self._failed.pop(content_digest, None)
        self._took.seconds = time.perf_counter() - begin
        return {"phase": "ready", "load_s": self._took.seconds, **self.status()}

    def _ask(self, stop: Stop) -> None:
        while not self._asking.acquire(timeout=_LOOK_S):
            if stop():
                raise LoaderError("the load was cancelled")

    def _check_room(self) -> None:
        """Refuse a load that cannot end well: what is being loaded lies beside what was."""
        room, needed = self._room(), 2 * sum(self._live_state().form.spans)
        if room is not None and room < needed:
            raise PlanRefusedError(
                f"a loader needs at least {needed} bytes of the device beside the live weights, "
                f"and may take {room}; set WEIGHTSYNC_DEVICE_ROOM, or lower gpu_memory_utilization"
            )

    def _make_room(self) -> None:
        """Let go of the arenas of a loader that is gone if a new one has no room beside them."""
        room = self._room()
        if room is not None and self._memory is not None:
            kept = sum(arena.nbytes for arena in self._arenas.values())
            nbytes = self._memory.nbytes
            if kept + nbytes + max(nbytes, self._took.peak) > room:
                self._drop_arenas()

    def _most_arenas(self, live: ModelState, peak: int) -> int:
        """Return how many arenas have room beside a load that takes `peak` bytes."""
        room = self._room()
        return 2 if room is not None and 2 * sum(live.form.spans) + peak <= room else 1

    def _load(
        self,
        loader: LoaderProcess | None,
        content_digest: str,
        path: str,
        document: str,
        stop: Stop,
        report: Report,
    ) -> None:
        if loader is None:
            raise LoaderError("the loader beside generation does not run; apply again")
        report({"load": "starting", "percent": 0})
        loader.wait_ready(stop)
        limit_s = max(_LEAST_S, _TIMES * self._took.seconds)

        def show(phase: dict[str, Any]) -> None:
            report({"load": phase["phase"], "percent": phase["percent"]})

        known = self._first.same_as if self._first is not None else None
        reply = loader.load(path, document, known, limit_s, stop, show)
        form = StateForm.from_json(reply["form"])
        live = self._live_state()
        _check_form(form, live.form)
        facts = LoadFacts.from_json(reply)
        numbers = {str(path): str(bits) for path, bits in reply["numbers"].items()}
        if self._first is not None:
            check_numbers(numbers, live, self._fixed)
        self._first = self._first or facts
        facts.check(self._first)
        memory = self._memory or ExchangedMemory(live, self._ops, self._threads)
        self._memory = memory
        # The one that is stored takes the place of another version.
        self._took.peak = max(self._took.peak, int(reply["peak"]))
        with memory.lock:
            most = self._most_arenas(live, int(reply["peak"]))
            arena = memory.replaceable(most, content_digest)
            memory.set_version(arena, None)
            failpoints.hit("worker.store")
            stored, fds = loader.store(arena, limit_s)
            if self._loader is not loader:
                raise LoaderError("another loader has taken its place")
            if "arena" in stored:
                self._open_arena(memory, arena, stored, fds)
            digests = tuple(bytes.fromhex(digest) for digest in stored["digests"])
            memory.set_version(arena, LoadedVersion(content_digest, digests, numbers))

    def _open_arena(
        self, memory: ExchangedMemory, index: int, stored: Mapping[str, Any], fds: list[int]
    ) -> None:
        opened = RankArena(stored["arena"], fds, memory.form.spans, self._device)
        try:
            memory.put_arena(index, opened.memory)
        except BaseException:
            opened.close()
            raise
        replaced, self._arenas[index] = self._arenas.get(index), opened
        if replaced is not None:
            replaced.close()

    def _live_state(self) -> ModelState:
        return state_of(self._model)

    def _end_loader(self, loader: LoaderProcess | None) -> None:
        # Another one may have taken its place, which has ended it.
        if loader is not None and self._loader is loader:
            self._loader = None
            loader.end()

    def check(self, layout: Layout, *, whole: bool) -> str:
        """Accept tensors of a version, or all if `whole`; return "": each has a place.

        Raises PlanRefusedError for others than the engine's checkpoint has.
        """
        if self._layout is not None:
            check_same(layout, self._layout, whole=whole)
        return ""

    def prepare(self, request: TransformRequest, stop: Stop) -> tuple[Prepared, Mapping[str, Any]]:
        """See `VersionTransform`; NeedsLoadError: not loaded, or an exchange broke off since."""
        del stop
        content_digest = request.staged.manifest.content_digest
        memory = self._memory
        found = memory.has(content_digest) if memory is not None else None
        if memory is None or found is None:
            raise NeedsLoadError
        live = self._live_state()
        memory.check_unmoved(live)
        check_numbers(found.numbers, live, self._fixed)
        report = {"reads_cache_otherwise": memory.reads_cache_otherwise(found)}
        return _ShadowPrepared(request.apply_id, found), {**report, **self.status()}

    def writer(self, target: Prepared, live: str) -> ParamWriter:
        del live
        assert self._memory is not None  # noqa: S101 - what is prepared lies there
        return _ShadowWriter(self._memory, _own(target).version)

    def invalidate(self, target: Prepared) -> None:
        """See `VersionTransform`: nothing was found in the live weights."""

    def compare(self, target: Prepared, stop: Stop) -> list[str]:
        assert self._memory is not None  # noqa: S101 - what is prepared lies there
        return self._memory.unlike(_own(target).version, stop=stop)


def _own(prepared: Prepared) -> _ShadowPrepared:
    assert isinstance(prepared, _ShadowPrepared)  # noqa: S101 - a rank keeps to one transform
    return prepared


def _check_form(loaded: StateForm, live: StateForm) -> None:
    wrong = loaded.differences(live)
    if wrong:
        msg = "this model cannot be updated: vLLM holds these differently after a second load of it"
        raise PlanRefusedError(msg, wrong)


#: What a loader takes of a CUDA device beside its tensors, bytes. With moe30 on an H200 there were
#: 0.9 GB beside the arena at rest, and 1.3 beside twice that at the peak, the rank's own in it.
_CONTEXT = 1 << 30
_GROUP = re.compile(r"[0-9a-f]{32}")


def shadow_of(
    worker: Any,
    model: torch.nn.Module,
    name: str,
    ops: DeviceOps,
    ranks: int,
    host_room: int | None = None,
) -> ShadowTransform:
    """Return the twin of vLLM's `worker`, whose `name` is `dp/pp/tp`.

    `host_room` bounds a loader's bytes where there is no device; None: it is not bounded.
    """

    def room() -> int | None:
        given = ops.memory_stats().get("device_room")
        return host_room if given is None else max(0, given - _CONTEXT)

    def start(group: str) -> LoaderStart:
        return LoaderStart(
            config=dump_config(_load_of(worker, model)),
            name=name,
            rank=int(worker.rank),
            local_rank=int(worker.local_rank),
            device=str(worker.device),
            rendezvous=_rendezvous(group, _replica(worker, name)),
            room=room(),
        )

    return ShadowTransform(model, worker.device, ops, start, ranks, room, _why_fixed(worker))


def _why_fixed(worker: Any) -> str:
    if getattr(worker.vllm_config.model_config, "enforce_eager", False):
        return ""
    return (
        "vLLM may have compiled or captured what is called with them; start vLLM with "
        "--enforce-eager, or restart it to serve this version"
    )


def _load_of(worker: Any, model: torch.nn.Module) -> ModelLoad:
    target, *drafts = parts_of(model)
    config = worker.vllm_config
    parts = [PartLoad(config, config.model_config, "", target.names)]
    for draft in drafts:
        call = load_call(draft.module)
        if call is None:
            msg = "start vLLM with VLLM_PLUGINS=weightsync: the load of the draft was not observed"
            raise LoaderError(msg)
        parts.append(PartLoad(call.config, call.model_config, call.prefix, draft.names))
    return ModelLoad(tuple(parts), shared_modules(model))


def _replica(worker: Any, name: str) -> str:
    """Return what tells the loaders of a replica from others'; "": all meet, as their ranks do."""
    together = getattr(worker.parallel_config, "data_parallel_size", 1) > 1
    return "" if together else f"-{name.partition('/')[0]}"


def _rendezvous(group: str, replica: str) -> str:
    """Return where the loaders of a group meet: nobody else can guess its name."""
    if not _GROUP.fullmatch(group):
        raise LoaderError(f"{group!r} is not the name of a group of loaders")
    return (Path(tempfile.gettempdir()) / f"weightsync-{group}{replica}").as_uri()
