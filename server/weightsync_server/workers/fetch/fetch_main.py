"""A fetcher process: `python -m weightsync_server.workers.fetch.fetch_main FD`.

The main thread only reads messages, so that no task holds up a cancellation or a sign of life;
tasks run in threads, and what they do releases the GIL.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import threading
from typing import TYPE_CHECKING, Any

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import ShardEntry
from weightsync.wire import child_channel
from weightsync.wire.documents import refusal
from weightsync_server.ops.os_errors import read_fault, write_fault
from weightsync_server.store.objects.object_keys import is_location
from weightsync_server.workers.fetch import shard_tasks
from weightsync_server.workers.runtime.mappings import MAX_MAPS, Maps

if TYPE_CHECKING:
    from weightsync_server.workers.fetch.gpu_copy import Opened, Registered


_OF_DELTAS = ("copy", "inspect", "patch")


class _Child:
    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._registered: Registered | None = None
        self._opened: Opened | None = None
        self._maps = Maps(before_unmapping=self._let_go)
        self._send_lock = threading.Lock()
        self._stops: dict[int, threading.Event] = {}

    def serve(self) -> None:
        child_channel.begin(self._sock)
        self._send({"op": "ready"})
        while True:
            request, fds = child_channel.receive(self._sock)
            op = request["op"]
            if op == "cancel":
                stop = self._stops.get(request["task"])
                if stop is not None:
                    stop.set()
            elif op == "tend":
                for name in request["forget"]:
                    self._maps.forget(name)
                if request["warm"]:
                    # A thread of its own: to import alone takes longer than an answer may.
                    threading.Thread(target=_warm, daemon=True).start()
                self._send({"id": request["id"]})
            else:
                stop = self._stops[request["id"]] = threading.Event()
                threading.Thread(target=self._run, args=(request, fds, stop), daemon=True).start()

    def _send(self, document: dict[str, Any], blob: bytes = b"") -> None:
        with self._send_lock:
            self._sock.sendall(child_channel.encode(document, blob))

    def _run(self, request: dict[str, Any], fds: list[int], stop: threading.Event) -> None:
        answer: dict[str, Any] = {"id": request["id"]}
        blob, broken = b"", False
        try:
            blob = self._do(request, fds, stop)
        except shard_tasks.Cancelled:
            answer |= {"reason": Reason.PUSH_ABORTED, "error": "cancelled"}
        except WeightSyncError as error:
            answer |= refusal(error)
            broken = isinstance(error, shard_tasks.BrokenError)
        except MemoryError:
            answer |= {"reason": Reason.MEMORY_EXHAUSTED, "error": "a fetcher has no memory left"}
        except Exception as error:  # noqa: BLE001 - a fault of ours must not look like a stuck task
            answer |= {"reason": Reason.FAULT, "error": f"a fetcher failed: {error!r}"}
        finally:
            self._stops.pop(request["id"], None)
        try:
            failpoints.hit("fetcher.reply")
            self._send(answer, blob)
        except OSError:
            # Half an answer may be on its way. The server gives the task to another process at
            # once, where it would wait long for this one; or it is gone itself.
            os._exit(1)
        if broken:
            os._exit(1)

    def _do(self, request: dict[str, Any], fds: list[int], stop: threading.Event) -> bytes:
        try:
            failpoints.hit("fetcher.task")
            if len(fds) != request["fds"]:
                # The kernel drops descriptors over the limit, and says so to nobody.
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            with contextlib.ExitStack() as stack:
                views = []
                for at, (name, capacity) in enumerate(request["segments"]):
                    writable = request["fills"] and at == 0
                    use = self._maps.use(name, fds.pop(0), capacity, writable=writable)
                    views.append(stack.enter_context(use))
                views[0] = stack.enter_context(views[0][: request["size"]])
                return self._act(request, views, fds, stop)
        except OSError as error:
            raise write_fault(error, "handing a segment to a fetcher") from error
        finally:
            for fd in fds:
                os.close(fd)

    def _act(
        self,
        request: dict[str, Any],
        views: list[memoryview],
        fds: list[int],
        stop: threading.Event,
    ) -> bytes:
        op, view = request["op"], views[0]
        place = request.get("target") or request.get("source")
        if place is not None and op not in _OF_DELTAS and is_location(place):
            return _on_object(request, place, view, fds, stop)
        if op in _OF_DELTAS:
            return self._on_delta(request, views, fds, stop)
        if "shard" in request:
            return _on_shard(request, view, stop)
        if op == "boxes":
            return shard_tasks.digest_slices(view, fds[0], stop)
        if op == "patch_boxes":
            # Not at the top: the codec is only for who gets deltas.
            from weightsync_server.workers.fetch import delta_tasks

            delta_tasks.patch_slices(view, views[1], views[2], fds[0], stop)
            return b""
        if op == "compose":
            from weightsync_server.workers.fetch import delta_tasks

            delta_tasks.compose(view, views[1], fds[0], stop)
            return b""
        if op == "collect":
            self._collect(view, fds[0], stop)
        elif op == "persist":
            shard_tasks.persist(view, request["target"], request["temporary"], stop)
        elif op == "load":
            shard_tasks.load(fds[0] if fds else self._open(request["source"], fds), view, stop)
        else:
            raise ValueError(f"unknown op {op!r}")
        return b""

    def _on_delta(
        self,
        request: dict[str, Any],
        views: list[memoryview],
        fds: list[int],
        stop: threading.Event,
    ) -> bytes:
        # Not at the top: numpy and the codec are only for who gets deltas.
        from weightsync_server.workers.fetch import delta_tasks

        delta_tasks.warm()
        if request["op"] == "copy":
            delta_tasks.copy(views[1], views[0], stop)
            return b""
        shard = ShardEntry(*request["delta"])
        if "source" in request:
            source = self._delta(request["source"], shard, fds, stop)
        else:
            source = views[-1][: shard.size]
        layouts = request["segments"]
        if request["op"] == "inspect":
            canonical = delta_tasks.canonical(layouts[0][0], views[0])
            return delta_tasks.inspect(canonical, source, stop)
        canonical = delta_tasks.canonical(layouts[1][0], views[1])
        delta_tasks.patch(views[0], request["index"], canonical, source, stop)
        return b""

    def _delta(
        self, place: str, shard: ShardEntry, fds: list[int], stop: threading.Event
    ) -> memoryview:
        from weightsync_server.workers.fetch import delta_tasks

        if is_location(place):
            from weightsync_server.workers.fetch import object_tasks

            return object_tasks.read(shard.size, place, stop)
        return delta_tasks.read(self._open(place, fds), shard, stop)

    def _collect(self, view: memoryview, fd: int, stop: threading.Event) -> None:
        # Not at the top: only one process in a server has a device.
        from weightsync_server.workers.fetch import gpu_copy

        with self._send_lock:
            registered = self._registered = self._registered or gpu_copy.Registered()
            opened = self._opened = self._opened or gpu_copy.Opened()
        gpu_copy.collect(view, gpu_copy.read_source(fd), registered, opened, stop)

    def _let_go(self, view: memoryview) -> None:
        if self._registered is not None:
            self._registered.drop(view)

    def _open(self, path: str, fds: list[int]) -> int:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise read_fault(error, "opening a stored shard") from error
        fds.append(fd)
        return fd


def _warm() -> None:
    from weightsync_server.workers.fetch import delta_tasks

    delta_tasks.warm()


def _on_shard(request: dict[str, Any], view: memoryview, stop: threading.Event) -> bytes:
    shard = ShardEntry(*request["shard"])
    if request["op"] == "digest":
        return shard_tasks.digest(view, shard, request["part"], stop)
    if request["op"] == "keep":
        shard_tasks.keep(view, shard, request["begin"], request["target"], stop)
        return b""
    if request["op"] == "restore":
        return shard_tasks.restore(view, shard, request["source"], stop).to_bytes(8, "big")
    raise ValueError(f"unknown op {request['op']!r}")


def _on_object(
    request: dict[str, Any], place: str, view: memoryview, fds: list[int], stop: threading.Event
) -> bytes:
    # Not at the top: what speaks with buckets is an extra.
    from weightsync_server.workers.fetch import object_tasks

    op = request["op"]
    if op == "persist":
        object_tasks.persist(view, place, stop)
    elif op == "keep":
        object_tasks.keep(view, ShardEntry(*request["shard"]), request["begin"], place, stop)
    elif op == "restore":
        good = object_tasks.restore(view, ShardEntry(*request["shard"]), place, stop)
        return good.to_bytes(8, "big")
    elif op == "load":
        object_tasks.load(view, place, stop)
    elif op == "load_cached":
        return object_tasks.load_cached(view, place, fds[0], stop)
    else:
        raise ValueError(f"unknown op {op!r} on an object")
    return b""


def _raise_limit() -> None:
    # Python's mmap keeps a descriptor per mapping.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4 * MAX_MAPS if hard == resource.RLIM_INFINITY else min(4 * MAX_MAPS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    sock = child_channel.connect()
    _raise_limit()
    try:
        _Child(sock).serve()
    except (EOFError, ConnectionError):
        # At once, also in the middle of a task: nobody waits for its result.
        os._exit(0)


if __name__ == "__main__":
    main()
