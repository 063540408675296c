"""The trainer's process: finds the class, attaches, and does what the server asks."""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import queue
import socket
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync import __version__
from weightsync.errors import Reason, WeightSyncError
from weightsync.fork_guard import NO_FORK, close_in_children
from weightsync.wire import child_channel
from weightsync.wire.child_channel import read_note
from weightsync_client.access import Access
from weightsync_client.client import Client
from weightsync_client.trainer.checkpoint_files import FolderOwner, write_checkpoint
from weightsync_client.trainer.job_runner import (
    JobRunner,
    TrainOrder,
    UserClassError,
    end_forked_child,
    failure_of,
)

if TYPE_CHECKING:
    from weightsync_client.attach import Attached


logger = logging.getLogger(__name__)


def import_class(named: str) -> Any:
    """Return the class of `module:Class`.

    Raises:
        TypeError: It is no class with setup and train.
        Exception: Its module cannot be imported.
    """
    module, _, name = named.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type) or not all(hasattr(found, part) for part in ("setup", "train")):
        msg = f"{module} has no class {name} with setup and train"
        raise TypeError(msg)
    return found


#: How often it is looked whether the engine is still the one that it has attached to, seconds.
_CHECK_S = 2.0
_IMPORT_REMEDY = (
    "; correct it, or start the server again with another --trainer module:Class, and with the "
    "module where --trainer-python looks, such as the folder in which the server was started, or "
    "PYTHONPATH"
)


class _TrainerProcess:
    """The main thread runs the user's class; another one reads, so that it is never held up.

    Args:
        sock: To the server.
        start: What that has told.
    """

    def __init__(self, sock: socket.socket, start: dict[str, Any]) -> None:
        self._sock = sock
        self._start = start
        self._pid = os.getpid()
        self._send_lock = threading.Lock()
        self._requests: queue.Queue[dict[str, Any]] = queue.Queue()
        self._stops: dict[int, threading.Event] = {}
        with NO_FORK:
            close_in_children(self)

    def leave_to_parent(self) -> None:
        """In a child that was forked: have the server see the end of the trainer, not of this."""
        self._sock.close()

    def run(self) -> None:
        """Attach, get ready, say so, then do one request after the other.

        Raises:
            EOFError: The server is gone.
        """
        start = self._start
        if start["release"] != __version__:
            self._send({"op": "failed", **_other_release(start["release"])})
            return
        with Client(start["address"], model=start["model"], access=Access()) as client:
            try:
                kind = _imported(start["trainer"])
                attached = client.attach(start["engine"])
                runner = JobRunner(kind, attached, self._send)
                runner.reset()
            except Exception as error:  # noqa: BLE001 - whatever it is, the server is told
                self._send({"op": "failed", **_facts_of(error)})
                return
            self._send({"op": "ready", "loads": runner.loads, "version": attached.version})
            threading.Thread(target=self._read, name="from the server", daemon=True).start()
            while True:
                self._serve(client, attached, runner)

    def _serve(self, client: Client, attached: Attached, runner: JobRunner) -> None:
        try:
            request = self._requests.get(timeout=_CHECK_S)
        except queue.Empty:
            self._check(attached)
            return
        self._check(attached)
        task = request["id"]
        if request["op"] == "train":
            order = TrainOrder(**request["order"])
            answer = runner.train(order, request["request"], self._stops[task])
        else:
            answer = _write(client, attached, request, self._stops[task])
        self._stops.pop(task, None)
        self._send(answer | {"id": task})

    def _check(self, attached: Attached) -> None:
        """End where the engine has another memory by now: the server starts a new process."""
        try:
            attached.check()
        except WeightSyncError as error:
            self._send({"op": "leaving", "why": error.message})
            os._exit(0)

    def _read(self) -> None:
        try:
            while True:
                request, fds = child_channel.receive(self._sock)
                if request["op"] == "cancel":
                    if stop := self._stops.get(request["task"]):
                        stop.set()
                elif request["op"] == "tend":
                    self._send({"id": request["id"]})
                else:
                    for fd in fds:
                        request |= read_note(fd)
                        os.close(fd)
                    self._stops[request["id"]] = threading.Event()
                    self._requests.put(request)
        except (EOFError, OSError):
            # At once, also in the middle of a job: the server that comes next has its own.
            os._exit(0)

    def _send(self, document: dict[str, Any]) -> None:
        # Before the lock, which another thread of the trainer may have had when it was forked.
        end_forked_child(self._pid)
        with self._send_lock:
            self._sock.sendall(child_channel.encode(document))


def _imported(named: str) -> Any:
    try:
        return import_class(named)
    except Exception as error:
        logger.exception("--trainer %s cannot be imported", named)
        raise UserClassError("the import", error, _IMPORT_REMEDY) from error


def _other_release(servers: str) -> dict[str, Any]:
    return {
        "reason": Reason.TRAINER_AWAY.value,
        "error": f"--trainer-python has weightsync {__version__} and the server {servers}; install "
        "the same release for both",
    }


def _facts_of(error: Exception) -> dict[str, Any]:
    """Return reason, sentence and facts for the server."""
    if isinstance(error, UserClassError):
        return error.answer
    if isinstance(error, WeightSyncError):
        return {"reason": error.reason.value, "error": error.message}
    logger.error("the trainer could not start; the traceback says why", exc_info=error)
    return failure_of(error, "the start of the trainer raised")


def _write(
    client: Client, attached: Attached, request: dict[str, Any], stop: threading.Event
) -> dict[str, Any]:
    owner, target = FolderOwner(request["owner"], request["keep"]), Path(request["target"])
    version, others = request["version"], request["loaded"]
    try:
        missing = write_checkpoint(client, attached, version, target, owner, stop, others)
    except WeightSyncError as error:
        return _facts_of(error)
    return {"missing": missing}


def main() -> None:
    """Serve the socket whose descriptor is the only argument until the server is gone."""
    sock = child_channel.connect()
    # Tells where a library has crashed.
    faulthandler.enable()
    try:
        start = child_channel.begin(sock)
        _TrainerProcess(sock, start).run()
    except (EOFError, ConnectionError):
        os._exit(0)
