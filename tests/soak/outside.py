"""What is done to the service from outside: limits, damage, clocks, rivals, floods, attacks."""

from __future__ import annotations

import contextlib
import os
import random
import resource
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tests.soak.attacks import ATTACKS
from tests.soak.callers import MODEL, TIMEOUT_S
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.controller import Controller
    from tests.soak.history import History
    from tests.soak.site import Site
    from tests.soak.trainer import Trainer

__all__ = ["Outside"]

#: Less than any shard; and less than any segment, but more than a server writes when it starts.
_SMALL_FILE, _SMALL_SEGMENT = 16 << 10, 128 << 10
_WAIT_S = 6.0
#: A call that does nothing but tell is answered within this time, however busy the machine is.
_TELL_S = 5.0
_MAX_PUSHES, _FLOOD = 4, 24
_HOUR_S, _DECADE_S = 3600, 10 * 365 * 86400
_CODE = grpc.StatusCode


class Outside:
    """Each method of `blows` is one blow and returns whether it struck.

    Args:
        site: The processes.
        trainer: For what it sees.
        controller: For its calls.
        still: Lets nobody call while it is entered.
        seed: Of all choices.
    """

    def __init__(
        self,
        site: Site,
        trainer: Trainer,
        controller: Controller,
        still: Callable[[], contextlib.AbstractContextManager[None]],
        seed: int,
    ) -> None:
        self._site = site
        self._trainer = trainer
        self._controller = controller
        self._still = still
        self._rng = random.Random(seed)

    @property
    def blows(self) -> dict[str, Callable[[], bool]]:
        """By name."""
        return {
            "terminate": self.terminate,
            "flip_stored": self.flip_stored,
            "flip_segment": self.flip_segment,
            "no_memory": self.no_memory,
            "no_files": self.no_files,
            "tear_journal": self.tear_journal,
            "jump_clock": self.jump_clock,
            "second_server": self.second_server,
            "flood": self.flood,
            "stall": self.stall,
            "attack": self.attack,
        }

    @property
    def _history(self) -> History:
        return self._controller.history

    # The server's life

    def terminate(self) -> bool:
        """Ask the server to end while it works: it drains and exits with 0."""
        if not self._site.pid:
            return False
        try:
            code = self._site.server.stop(60)
        except subprocess.TimeoutExpired:
            code = -1
        if code:
            self._history.violate(f"the server ended with {code} when it was asked to")
        return True

    def tear_journal(self) -> bool:
        """Kill the server and leave half a record, zeros or garbage at the end of its journal."""
        with self._still():
            told = self._site.engine.told()
            if told is None or not told["generating"]:
                return False
            self._site.kill_server()
            path = self._site.state / "journal"
            size = self._rng.randrange(1, 200)
            last = path.read_bytes()[-size - 1 : -1]
            with path.open("ab") as file:
                file.write(self._rng.choice((last, bytes(size), self._rng.randbytes(size))))
            self._site.start_server()
        return True

    def jump_clock(self) -> bool:
        """Start the server with a wall clock that is an hour or ten years off."""
        ahead = self._rng.choice((_HOUR_S, -_HOUR_S, _DECADE_S, -_DECADE_S))
        self._site.kill_server()
        self._site.server.wrapper = [sys.executable, "-m", "tests.soak.clock", str(ahead)]
        try:
            self._site.start_server()
        finally:
            self._site.server.wrapper = ()
        return True

    def second_server(self) -> bool:
        """Start another server on the same state: it must refuse."""
        with contextlib.ExitStack() as stack:
            starts = self._site.starts
            folder = self._site.state.with_name("run2")
            folder.mkdir(exist_ok=True)
            rival = WeightSyncServer(folder, self._site.state, flags=self._site.server.flags)
            process = subprocess.Popen(
                rival.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            try:
                code = process.wait(30)
            except subprocess.TimeoutExpired:
                code = 0
            if code == 0 and starts == self._site.starts:
                self._history.violate("a second server runs on one state")
        return True

    # What there is not enough of

    def no_memory(self) -> bool:
        """Start the server where no segment can be made: it says so, and goes on when it can."""
        self._site.kill_server()
        limit = f'ulimit -S -f {_SMALL_SEGMENT // 512}; exec "$@"'
        self._site.server.wrapper = ["sh", "-c", limit, "sh"]
        try:
            # It may have to write more, and then says so and does not start.
            with contextlib.suppress(RuntimeError):
                self._site.start_server()
            return bool(self._site.pid) and self._told_of_memory()
        finally:
            self._site.server.wrapper = ()
            for pid in [self._site.pid, *self._site.fetchers()]:
                _limit(pid, resource.RLIM_INFINITY)

    def no_files(self) -> bool:
        """Let no file of the fetchers grow: pushes are refused, and later accepted."""
        fetchers = self._site.fetchers()
        before = self._trainer.seen[Reason.DISK_EXHAUSTED]
        for pid in fetchers:
            _limit(pid, _SMALL_FILE)
        self._trainer.wish = "push"
        try:
            return _until(lambda: self._trainer.seen[Reason.DISK_EXHAUSTED] > before)
        finally:
            self._trainer.wish = ""
            for pid in fetchers:
                _limit(pid, resource.RLIM_INFINITY)

    # Damage

    def flip_stored(self) -> bool:
        """Flip a bit of a stored version: it is never handed out, as every pull compares."""
        with self._still():
            version = self._stored_only()
            if not version:
                return False
            path = self._site.state / "store" / MODEL / f"v{version}" / "0.safetensors"
            with path.open("r+b") as file:
                place = self._rng.randrange(path.stat().st_size)
                _flip(file.fileno(), place, self._rng.randrange(8))
            outcome = self._controller.pull(version)
            self._controller.delete_version(version, force=True)
            # With a real vLLM the same content may have been at hand in another version's slot.
            return outcome == Reason.DATA_CORRUPT

    def flip_segment(self) -> bool:
        """Flip a bit of a staged version in shared memory: it is never applied."""
        with self._still():
            committed, live = self._history.snapshot()
            above = [version for version in committed if version > max(live, default=0)]
            version = max(above, default=0)
            number = self._controller.contents.known.get(committed.get(version, ""))
            if number is None:
                return False
            # An engine that is away lets no apply find it: it stays there for whoever reads.
            self._controller.flipped.add(number)
            if not self._flip_in_memory(number):
                return False
            outcome = self._controller.apply_version(version)
            if outcome == "ok":
                self._history.violate(f"version {version} was applied with a flipped bit")
            return outcome == Reason.DATA_CORRUPT

    # Callers that nobody wants

    def flood(self) -> bool:
        """Begin many pushes at once: as many as may be are open, the rest is refused."""
        stub, before = self._controller.stub, (self._site.starts, self._history.epoch)
        calls = []
        for _ in range(_FLOOD):
            request = pb.BeginPushRequest(model=MODEL, version=self._history.next_version())
            calls.append(stub.BeginPush.future(request, timeout=1.5))
        answers = [self._controller.call("flood", call.result) for call in calls]
        begun = [answer.push_id for answer, _ in answers if answer is not None]
        for push_id in begun:
            self._abort(push_id)
        # A new epoch ends those of the old one, and others may take their places.
        same = before == (self._site.starts, self._history.epoch)
        if len(begun) > _MAX_PUSHES and same:
            self._history.violate(f"{len(begun)} pushes were open at once")
        return any(outcome == Reason.LIMIT_EXCEEDED for _, outcome in answers)

    def stall(self) -> bool:
        """Open streams on which nothing comes: everybody else is answered."""
        over, stub, starts = threading.Event(), self._controller.stub, self._site.starts
        versions = [self._history.next_version() for _ in range(_MAX_PUSHES)]

        def silent(version: int) -> Iterator[pb.PushWeightsRequest]:
            begin = pb.BeginPushRequest(model=MODEL, version=version)
            yield pb.PushWeightsRequest(begin=begin)
            over.wait(_WAIT_S)

        calls = [stub.PushWeights.future(silent(v), timeout=_WAIT_S) for v in versions]
        ours: dict[int, str] = {}
        for _ in range(5):
            begun = time.monotonic()
            told, _ = self._controller.call(
                "status", lambda: stub.GetStatus(pb.GetStatusRequest(), timeout=TIMEOUT_S)
            )
            took = time.monotonic() - begun
            pushes = told.models[0].pushes if told is not None else []
            ours |= {push.version: push.push_id for push in pushes if push.version in versions}
            if took > _TELL_S and starts == self._site.starts:
                self._history.violate(f"GetStatus took {took:.1f} s while streams stood still")
            time.sleep(0.1)
        over.set()
        for call in calls:
            self._controller.call("stall", call.result)
        for push_id in ours.values():
            self._abort(push_id)
        return bool(ours)

    def attack(self) -> bool:
        """Send what no trainer would: refused with the right status, and nothing changes."""
        name = self._rng.choice(list(ATTACKS))
        call, expected = ATTACKS[name]
        starts = self._site.starts
        try:
            call(self._controller.stub, self._history.next_version())
        except grpc.RpcError as error:
            code: Any = error.code()
        else:
            code = _CODE.OK
        passing = (_CODE.UNAVAILABLE, _CODE.RESOURCE_EXHAUSTED, _CODE.DEADLINE_EXCEEDED)
        self._history.record("attack", code.name, name=name)
        if code not in (*expected, *passing) and starts == self._site.starts:
            self._history.violate(f"{name} was answered with {code.name}")
        return code in expected

    # Inside

    def _abort(self, push_id: str) -> None:
        request = pb.AbortPushRequest(push_id=push_id)
        stub = self._controller.stub
        self._controller.call("abort", lambda: stub.AbortPush(request, timeout=TIMEOUT_S))

    def _told_of_memory(self) -> bool:
        def told() -> bool:
            status, _ = self._controller.call(
                "status",
                lambda: self._controller.stub.GetStatus(pb.GetStatusRequest(), timeout=5),
            )
            return status is not None and "memory" in status.models[0].engine.reason

        return _until(told)

    def _stored_only(self) -> int:
        """Return a version that lies in the store alone; 0: there is none."""
        committed, live = self._history.snapshot()
        request = pb.ListVersionsRequest(model=MODEL)
        told, _ = self._controller.call(
            "list", lambda: self._controller.stub.ListVersions(request, timeout=20)
        )
        infos = told.versions if told is not None else []
        # What others are made of would take them along.
        bases = {info.base_version for info in infos}
        absent = {
            info.version
            for info in infos
            if info.residency == pb.RESIDENCY_ABSENT and not info.chain_length
        } - bases
        old = sorted((absent & committed.keys()) - live)[:-6]
        return self._rng.choice(old) if old else 0

    def _flip_in_memory(self, number: int) -> bool:
        """Flip a bit of the only segment that holds the first shard of a content."""
        data = self._controller.contents.shards(number)[0][1]
        found: dict[int, Path] = {}
        for fd in Path(f"/proc/{self._site.pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if "memfd:weightsync" not in str(fd.readlink()):
                    continue
                with fd.open("rb", buffering=0) as file:
                    if os.pread(file.fileno(), len(data), 0) == data:
                        found[os.fstat(file.fileno()).st_ino] = fd
        if len(found) != 1:
            # With a real vLLM there are few contents, and versions that share them.
            return False
        (fd,) = found.values()
        with contextlib.suppress(OSError), fd.open("r+b", buffering=0) as file:
            _flip(file.fileno(), self._rng.randrange(len(data)), self._rng.randrange(8))
            return True
        return False


def _flip(fd: int, place: int, bit: int) -> None:
    (byte,) = os.pread(fd, 1, place)
    os.pwrite(fd, bytes([byte ^ 1 << bit]), place)


def _limit(pid: int, size: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if pid:
            _, hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (size, hard))


def _until(holds: Callable[[], bool]) -> bool:
    end = time.monotonic() + _WAIT_S
    while not holds():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
