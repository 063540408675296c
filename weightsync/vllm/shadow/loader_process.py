"""A rank's loader: a process of its own, started, asked and ended from here."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weightsync import clock
from weightsync.vllm.apply.device_ops import Stop
from weightsync.wire.documents import receive, receive_fds, send

logger = logging.getLogger(__name__)


#: How long a loader may take until it can load, seconds.
_START_S = 120.0
#: How long it has to end when it is asked to, before it is killed, seconds.
_END_S = 5.0
#: How often it is looked at whether the load is still wanted, seconds.
_LOOK_S = 0.2


class LoaderError(Exception):
    """A loader has failed, and ended; its text is one sentence."""


class LoaderRefusedError(Exception):
    """A loader cannot load a version, but others: `names` are the first of `total` tensors."""

    def __init__(self, message: str, names: list[str], total: int) -> None:
        super().__init__(message)
        self.names = names
        self.total = total


@dataclass(frozen=True)
class LoaderStart:
    """What a loader begins with.

    Attributes:
        config: vLLM's configuration, as `loader_config` writes it.
        name: `dp/pp/tp` of the rank.
        rank: In the executor.
        local_rank: On this host, as vLLM counts.
        device: The rank's own, as torch names it.
        rendezvous: Where the loaders of the engine meet.
        room: Bytes of device memory that it may take; None: it needs none.
    """

    config: bytes
    name: str
    rank: int
    local_rank: int
    device: str
    rendezvous: str
    room: int | None


class LoaderProcess:
    """One process, which dies with the thread that makes this."""

    def __init__(self, start: LoaderStart) -> None:
        self.ready = False
        self.mapped: frozenset[str] = frozenset()
        self._name = start.name
        self._config = start.config
        ours, theirs = socket.socketpair()
        self._sock = ours
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "weightsync.vllm.shadow.loader_main", str(theirs.fileno())],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
            )
        facts = {name: fact for name, fact in vars(start).items() if name != "config"}
        send(ours, {"parent": os.getpid(), **facts})
        # More than a pipe holds would wait for a program that is still starting.
        threading.Thread(target=self._configure, name="weightsync", daemon=True).start()

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def wait_ready(self, stop: Stop) -> None:
        """Return when it can load; LoaderError: it did not come up."""
        if not self.ready:
            self._next("ready", clock.monotonic() + _START_S, stop, lambda _: None)
            self.ready = True

    def load(
        self,
        path: str,
        document: str,
        same_as: Mapping[str, str] | None,
        limit_s: float,
        stop: Stop,
        progress: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        """Return what a version has become in the loader's own memory; `store` takes it over.

        The segment `document` at the socket `path` says where it lies. `same_as` is what the first
        loader of the rank has found, see `LoadFacts`; None: this one is the first.

        Raises:
            LoaderRefusedError: The version is none for this model.
            LoaderError: It failed, was stopped, or took too long.
        """
        asked = {"socket": path, "document": document}
        known = dict(same_as) if same_as is not None else None
        self._send({"op": "load", **asked, "same_as": known})
        return self._next("loaded", clock.monotonic() + limit_s, stop, progress)

    def store(self, arena: int, limit_s: float) -> tuple[dict[str, Any], list[int]]:
        """Have it fill an arena, which nobody else uses meanwhile.

        Returns its report, and the descriptors of a new arena. After a LoaderError it is unknown
        what the arena holds.
        """
        self._send({"op": "store", "arena": arena})
        reply = self._next("stored", clock.monotonic() + limit_s, bool, lambda _: None)
        return reply, receive_fds(self._sock, int(reply.get("fds", 0)))

    def unmap(self, segments: Sequence[str], limit_s: float) -> None:
        """Have it let go of segments; those that something still reads stay in `mapped`."""
        self._send({"op": "unmap", "segments": list(segments)})
        self._next("unmapped", clock.monotonic() + limit_s, bool, lambda _: None)

    def end(self) -> None:
        """End it; it is gone when this returns."""
        self.ready = False
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._child.terminate()
        try:
            self._child.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()
        self._sock.close()

    def _configure(self) -> None:
        assert self._child.stdin is not None  # noqa: S101 - it was asked for
        with contextlib.suppress(OSError), self._child.stdin as pipe:
            pipe.write(self._config)

    def _send(self, request: dict[str, Any]) -> None:
        try:
            send(self._sock, request)
        except OSError as error:
            raise LoaderError(self._last_word()) from error

    def _next(
        self,
        wanted: str,
        deadline: float,
        stop: Stop,
        progress: Callable[[dict[str, Any]], None],
    ) -> dict[str, Any]:
        phase = {"phase": "starting", "percent": 0}
        while True:
            reply = self._receive(deadline, stop, phase)
            event = reply.get("event")
            self.mapped = frozenset(map(str, reply.get("mapped", self.mapped)))
            if event == wanted:
                return reply
            if event == "progress":
                phase = {"phase": str(reply["phase"]), "percent": int(reply["percent"])}
                progress(phase)
            elif event == "refused":
                names = [str(name) for name in reply["names"]]
                raise LoaderRefusedError(str(reply["error"]), names, int(reply["names_total"]))
            else:
                raise LoaderError(f"the loader failed: {reply.get('error')}")

    def _receive(self, deadline: float, stop: Stop, phase: dict[str, Any]) -> dict[str, Any]:
        while True:
            if stop():
                raise LoaderError("the load was cancelled")
            if clock.monotonic() > deadline:
                msg = f"the loader took too long ({phase['phase']}, {phase['percent']} %)"
                raise LoaderError(msg)
            self._sock.settimeout(_LOOK_S)
            try:
                if not self._sock.recv(1, socket.MSG_PEEK):
                    raise EOFError
                # What has begun to come comes whole, unless the process is stopped.
                self._sock.settimeout(max(1.0, deadline - clock.monotonic()))
                return receive(self._sock)
            except TimeoutError:
                continue
            except (EOFError, OSError, ValueError) as error:
                raise LoaderError(self._last_word()) from error

    def _last_word(self) -> str:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._child.wait(_END_S)
        return f"the loader of rank {self._name} ended with status {self._child.poll()}"
