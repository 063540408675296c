"""A rank's end of a transfer of vLLM's own: what it receives goes into shared memory."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch

from weightsync import clock
from weightsync.shm.segment_socket import OfferedFile, SegmentClient
from weightsync.vllm.extensions.received.update_file import TensorKind, UpdateSink, announced
from weightsync.vllm.worker.rank_job import RefusedCallError
from weightsync.vllm.worker_protocol import rank_name

logger = logging.getLogger(__name__)


#: How often it is looked whether anything comes, seconds.
_LOOK_S = 0.1


class UpdateStep:
    """Work beside generation; `error`, "" if it did not fail, is known once it is `over`.

    The thread calls `undo` after `work` if nobody waited for that.
    """

    def __init__(self, work: Callable[[], None], undo: Callable[[], None]) -> None:
        self.error = ""
        self.over = False
        self._work, self._undo = work, undo
        self._left = False
        self._lock = threading.Lock()
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="weightsync-update", daemon=True).start()

    def watch(self, arrived: Callable[[], int], limit_s: float, end: Callable[[], None]) -> None:
        """Call `end`, from a thread, when `arrived()` stays the same for `limit_s`.

        This rank may not answer calls then: what waits for its device waits for the trainer too.
        """
        threading.Thread(
            target=self._watch, args=(arrived, limit_s, end), name="weightsync-watch", daemon=True
        ).start()

    def leave(self) -> bool:
        """Wait for it no longer; return whether it was over, so that its thread undoes nothing."""
        with self._lock:
            self._left = True
            return self.over

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            logger.exception("weightsync: a step of an update failed")
            self.error = f"{type(error).__name__}: {error}"[:500]
        with self._lock:
            self.over = True
            left = self._left
        self._ended.set()
        if left:
            self._undo()

    def _watch(self, arrived: Callable[[], int], limit_s: float, end: Callable[[], None]) -> None:
        before, since = arrived(), clock.monotonic()
        while not self._ended.wait(_LOOK_S):
            now = arrived()
            if now != before:
                before, since = now, clock.monotonic()
            elif clock.monotonic() - since > limit_s:
                logger.error("weightsync: nothing arrived for %g s; the update is dropped", limit_s)
                end()
                return


class TrainerConnection:
    """Ends without a word of the trainer; every method may be called by any thread.

    `close` ends `wire`, vLLM's own engine, and what is under way on it, which may take seconds.
    """

    def __init__(self, wire: Any, close: Callable[[], None]) -> None:
        self.wire = wire
        self._close = close
        self._lock = threading.Lock()
        self._ended = False

    @property
    def open(self) -> bool:
        """Whether nobody has begun to end it."""
        return not self._ended

    def refuse(self) -> None:
        """Begin no transfer any more; one that is under way goes on until `end`.

        Returns at once. No transfer may use a communicator that is being freed.
        """
        self._ended = True
        sink: UpdateSink = self.wire.model
        sink.leave()
        group = getattr(self.wire, "model_update_group", None)
        if group is not None:
            group.broadcast = _refuse_broadcast

    def end(self) -> None:
        """Refuse, and end what is under way, which takes seconds where a communicator waits."""
        self.refuse()
        # Twice at once would free a communicator twice.
        with self._lock:
            try:
                self._close()
            except Exception:
                logger.exception("weightsync: a connection to a trainer could not be closed")


def _refuse_broadcast(*args: object, **more: object) -> NoReturn:
    del args, more
    raise RuntimeError("the connection to the trainer was ended")


_ATTRIBUTE = "_weightsync_updates"
#: The rank that keeps what all of them get.
_KEEPER = "0/0/0"


class TransferEngine(Protocol):
    device: torch.device

    def make_wire(self, sink: UpdateSink) -> Any:
        """Return vLLM's own engine of the transfer, with a sink for its model."""

    def close_wire(self, wire: Any) -> None:
        """End the connection, and what a device waits for on it."""

    def end_update(self, wire: Any) -> None:
        """Let go of what belongs to the trainer; the connection stays."""

    def own_update(self, info: Mapping[str, Any]) -> dict[str, Any]:
        """Return an update info as vLLM's engine knows it."""


class UpdateReceiver:
    """Takes one update at a time; every call returns at once, and all come from one thread."""

    def __init__(self, engine: TransferEngine, *, keeps: bool) -> None:
        self._engine = engine
        self._keeps = keeps
        self._connection: TrainerConnection | None = None
        self._sink = UpdateSink(keeps=keeps)
        self._step: UpdateStep | None = None
        #: What comes next: its tensors, and the info as the wire knows it.
        self._next: tuple[Sequence[TensorKind], Any] | None = None

    def call(self, args: Mapping[str, Any]) -> dict[str, Any]:
        """Do or begin the `step` that `args` name, or refuse it, with the remedy."""
        steps: dict[str, Callable[[Mapping[str, Any]], None]] = {
            "open": self._open,
            "check": self._check,
            "reserve": self._reserve,
            "receive": self._receive,
            "offer": self._offer,
            "drop": self._drop,
            "leave": self._leave,
        }
        step = str(args.get("step", ""))
        if step != "poll":
            steps[step](args)
        return self._report()

    def _report(self) -> dict[str, Any]:
        # Asked first: a step that ends meanwhile is one that still runs, and not one that is well.
        running = not self._idle
        raised = self._step.error if self._step is not None else ""
        return {
            "open": self._connection is not None and self._connection.open,
            "running": running,
            "arrived": self._sink.arrived,
            # Whether the transfer itself failed, and not only what was made of it.
            "raised": bool(raised),
            "failure": raised or self._sink.failure,
            "files": [file.name for file in self._sink.files],
        }

    def _open(self, args: Mapping[str, Any]) -> None:
        """Meet the trainer; what was open before is closed."""
        self._leave({})
        wire = self._engine.make_wire(self._sink)
        info = wire.parse_init_info(dict(args["info"]))
        connection = self._connection = TrainerConnection(
            wire, lambda: self._on_device(lambda: self._engine.close_wire(wire))
        )
        self._begin(lambda: wire.init_transfer_engine(info), connection.end)

    def _check(self, args: Mapping[str, Any]) -> None:
        self._check_idle()
        wire = self._open_connection().wire
        info = args["info"]
        self._next = announced(info), wire.parse_update_info(self._engine.own_update(info))

    def _reserve(self, args: Mapping[str, Any]) -> None:
        """Get the memory for what was checked; that is no time in which the trainer is late."""
        del args
        self._check_idle()
        sink, (tensors, _) = self._sink, self._checked()
        self._begin(lambda: sink.begin(tensors), sink.close)

    def _receive(self, args: Mapping[str, Any]) -> None:
        self._check_idle()
        connection, sink, (_, info) = self._open_connection(), self._sink, self._checked()
        self._next = None

        def receive() -> None:
            try:
                with _stream_of(self._engine.device):
                    connection.wire.receive_weights(info)
            except BaseException as error:
                sink.fail(f"{type(error).__name__}: {error}"[:500])
                raise
            sink.end()

        step = self._begin(receive, sink.close)
        step.watch(lambda: sink.arrived, float(args["limit_s"]), connection.end)

    def _offer(self, args: Mapping[str, Any]) -> None:
        self._check_idle()
        sink = self._sink
        error = self._step.error if self._step is not None else ""
        if why := sink.failure or error:
            raise RefusedCallError(why)
        if not sink.whole:
            msg = "not all announced tensors arrived; send the update again"
            raise RefusedCallError(msg)
        socket, offer = str(args["socket"]), str(args["offer"])
        self._begin(lambda: _send(sink, socket, offer), sink.close)

    def _drop(self, args: Mapping[str, Any]) -> None:
        """Forget what has come; the connection stays for the next update."""
        del args
        self._check_idle()
        self._step = self._next = None
        self._sink.close()
        self._sink = UpdateSink(keeps=self._keeps)
        if self._connection is not None and self._connection.open:
            self._engine.end_update(self._connection.wire)
            self._connection.wire.model = self._sink

    def _leave(self, args: Mapping[str, Any]) -> None:
        del args
        self._next = None
        step, self._step = self._step, None
        connection, self._connection = self._connection, None
        sink, self._sink = self._sink, UpdateSink(keeps=self._keeps)
        if connection is not None:
            connection.refuse()
        # What a thread may still write is closed by that.
        if step is None or step.leave():
            sink.close()
        if connection is not None:
            # What is under way ends by that.
            threading.Thread(target=connection.end, name="weightsync-wire", daemon=True).start()

    def _begin(self, work: Callable[[], None], undo: Callable[[], None]) -> UpdateStep:
        self._step = UpdateStep(lambda: self._on_device(work), undo)
        return self._step

    def _on_device(self, work: Callable[[], None]) -> None:
        if self._engine.device.type == "cuda":
            torch.cuda.set_device(self._engine.device)
        work()

    @property
    def _idle(self) -> bool:
        return self._step is None or self._step.over

    def _check_idle(self) -> None:
        if not self._idle:
            raise RefusedCallError("this rank is still running the previous step; wait for it")

    def _open_connection(self) -> TrainerConnection:
        if self._connection is None or not self._connection.open:
            msg = "there is no connection to a trainer; call init_weight_transfer_engine first"
            raise RefusedCallError(msg)
        return self._connection

    def _checked(self) -> tuple[Sequence[TensorKind], Any]:
        if self._next is None:
            raise RefusedCallError("no update was checked; call update_weights")
        return self._next


def _stream_of(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Keep copies out of the streams that steps of generation use."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream: Any = torch.cuda.Stream
    return torch.cuda.stream(stream(device))


def _send(sink: UpdateSink, socket: str, offer: str) -> None:
    if not sink.files:
        return
    offered: list[OfferedFile] = [(file.name, file.size, file.sealed()) for file in sink.files]
    with SegmentClient(socket) as client:
        client.offer(offer, offered)
    sink.close()


def update_receiver(worker: Any) -> UpdateReceiver:
    """Return the one of a vLLM worker; RefusedCallError: its backend is none of ours."""
    found = getattr(worker, _ATTRIBUTE, None)
    if found is None:
        engine: Any = getattr(worker, "weight_transfer_engine", None)
        if not hasattr(engine, "make_wire"):
            msg = "this rank has no backend that receives weights; name one when vLLM is started"
            raise RefusedCallError(msg)
        name = rank_name(worker.parallel_config, worker.rank)
        found = UpdateReceiver(engine, keeps=name == _KEEPER)
        setattr(worker, _ATTRIBUTE, found)
    assert isinstance(found, UpdateReceiver)  # noqa: S101 - nobody else uses the name
    return found


def receive_update(worker: Any, args: Mapping[str, Any]) -> dict[str, Any]:
    return update_receiver(worker).call(args)
