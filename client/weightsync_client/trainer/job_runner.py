"""Runs the user's class: gets it ready, gives it jobs, saves and loads what it keeps."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weightsync.errors import Reason, WeightSyncError
from weightsync_client.trainer.checkpoint_files import sync_folder
from weightsync_client.trainer_base import Progress

if TYPE_CHECKING:
    from weightsync_client.attach import Attached


logger = logging.getLogger(__name__)


#: Bytes; a status has to fit into 8 KiB of trailers, where a text may take thrice its size.
_SENTENCE, _TRACEBACK = 400, 2400


class UserClassError(Exception):
    """A method of the user's class raised.

    Args:
        doing: Which.
        error: What it raised.
        remedy: What helps, as the end of a sentence.

    Attributes:
        answer: What the server is told.
    """

    def __init__(self, doing: str, error: BaseException, remedy: str = "") -> None:
        super().__init__(doing)
        self.answer = failure_of(error, f"{doing} of the trainer's class raised")
        self.answer["error"] += remedy


@contextlib.contextmanager
def users_code(doing: str, remedy: str = "") -> Iterator[None]:
    """Have what the user's class raises be told, whatever it is.

    Args:
        doing: Which method runs in the block.
        remedy: What helps, as the end of a sentence.

    Raises:
        UserClassError: It raised.
    """
    try:
        yield
    except UserClassError:
        raise
    except BaseException as error:  # also SystemExit, which is no end of the trainer
        logger.error("%s of the trainer's class raised\n%s", doing, _trace_of(error).decode())  # noqa: TRY400 - with what a log can hold
        raise UserClassError(doing, error, remedy) from error


def failure_of(error: BaseException, sentence: str) -> dict[str, Any]:
    """Return reason, sentence and facts for the server.

    Args:
        error: What was raised.
        sentence: What comes before it.
    """
    what = f"{type(error).__name__}: {_text_of(error)}".strip(": ")
    metadata = {"traceback": _trace_of(error)[-_TRACEBACK:].decode(errors="ignore")}
    if isinstance(error, WeightSyncError):
        metadata["cause"] = error.reason.value
    return {
        "reason": Reason.TRAINER_FAILED.value,
        "error": f"{sentence} {_cut(what)}",
        "metadata": metadata,
    }


def _text_of(error: BaseException) -> str:
    """Return what an error says; of one that cannot say it, that."""
    try:
        return str(error)
    except BaseException as other:  # noqa: BLE001 - it is the user's code as well
        return f"its text raised {type(other).__name__}"


def _trace_of(error: BaseException) -> bytes:
    try:
        lines = traceback.format_exception(error)
    except BaseException:  # noqa: BLE001 - it is the user's code as well
        lines = [*traceback.format_tb(error.__traceback__), type(error).__name__]
    return "".join(lines).encode(errors="replace")


def _cut(text: str) -> str:
    data = text.encode(errors="backslashreplace")
    if len(data) <= _SENTENCE:
        return data.decode()
    return data[: _SENTENCE - 3].decode(errors="ignore") + "..."


def end_forked_child(trainer: int) -> None:
    """Return in the trainer's process alone; one that was forked from it ends here, with status 1.

    Args:
        trainer: Process id of the trainer.
    """
    pid = os.getpid()
    if pid == trainer:
        return
    logger.error(
        "process %d, forked from trainer %d, returned from the trainer's class and was ended; "
        "end such a process with os._exit, or start it as a separate program",
        pid,
        trainer,
    )
    os._exit(1)


_STEPS = "it must yield weightsync_client.trainer.Progress after each step"


@dataclass(frozen=True)
class TrainOrder:
    """What the server says of a job.

    Attributes:
        job: Its id.
        version: The live version.
        content_digest: Of that.
        state: keep, load or reset.
        folder: load: from where.
        saving: What the names of folders begin with in which states are saved.
    """

    job: str
    version: int
    content_digest: str
    state: str
    folder: str
    saving: str


class JobRunner:
    """Has one instance of the user's class at a time. Every method belongs to the main thread.

    Args:
        kind: The class.
        attached: The live parameters.
        tell: Sends the server a notice.
    """

    def __init__(
        self, kind: Any, attached: Attached, tell: Callable[[dict[str, Any]], None]
    ) -> None:
        self._kind = kind
        self._attached = attached
        self._tell = tell
        self._pid = os.getpid()
        self._trainer: Any = None

    @property
    def loads(self) -> bool:
        """Whether the class can load a state."""
        return hasattr(self._kind, "load_state")

    def reset(self) -> None:
        """Have a new instance.

        Raises:
            UserClassError: There is none.
        """
        # Memory of the one before is free for the next.
        self._trainer = None
        with self._users_code("setup", "; correct the class"):
            trainer = self._kind()
            trainer.setup(self._attached)
        self._trainer = trainer

    def train(
        self, order: TrainOrder, request: Mapping[str, Any], cancelled: threading.Event
    ) -> dict[str, Any]:
        """Do a job and return what the server is answered."""
        began = time.perf_counter()
        attached = self._attached
        # An apply may have come in between; what it wrote lies in the same memory.
        attached.version, attached.content_digest = order.version, order.content_digest
        answer: dict[str, Any] = {}
        try:
            self._get_ready(order)
            self._tell({"op": "started", "version": order.version})
            with users_code("train"):
                self._do(order, request, cancelled)
        except UserClassError as error:
            answer = error.answer
        answer = self._settled() | answer
        if cancelled.is_set():
            answer = {"reason": Reason.CANCELLED.value, "error": "it was cancelled"}
        committed = attached.version if attached.version != order.version else 0
        seconds = time.perf_counter() - began
        return answer | {"version": attached.version, "committed": committed, "seconds": seconds}

    def _settled(self) -> dict[str, Any]:
        """Wait for a transaction in the background; return what is said of one that failed.

        It is this job's, and none of the next one's.
        """
        try:
            with users_code("train"):
                self._attached.settle_transaction()
        except UserClassError as error:
            return error.answer
        return {}

    @contextlib.contextmanager
    def _users_code(self, doing: str, remedy: str = "") -> Iterator[None]:
        with users_code(doing, remedy):
            yield
        end_forked_child(self._pid)

    def _get_ready(self, order: TrainOrder) -> None:
        if self._trainer is None or order.state == "reset":
            self.reset()
        if order.state == "load":
            with self._users_code("load_state"):
                self._trainer.load_state(Path(order.folder))

    def _do(
        self, order: TrainOrder, request: Mapping[str, Any], cancelled: threading.Event
    ) -> None:
        saved = order.version
        steps = self._trainer.train(request, cancelled)
        if not isinstance(steps, Iterable):
            msg = f"train returned {type(steps).__name__}; {_STEPS}"
            raise TypeError(msg)
        steps = iter(steps)
        with contextlib.ExitStack() as stack:
            if close := getattr(steps, "close", None):
                # In the middle of a transaction this takes it back.
                stack.callback(close)
            for progress in steps:
                saved = self._step(order, progress, saved)
                if cancelled.is_set():
                    return
        self._save(order, saved)

    def _step(self, order: TrainOrder, progress: Any, saved: int) -> int:
        if not isinstance(progress, Progress):
            msg = f"train yields {type(progress).__name__}; {_STEPS}"
            raise TypeError(msg)
        step = {
            "op": "step",
            "step": _count("step", progress.step),
            "loss": None if progress.loss is None else float(progress.loss),
            "tokens": None if progress.tokens is None else _count("tokens", progress.tokens),
        }
        now = self._save(order, saved)
        self._tell({**step, "version": now if now != saved else 0})
        return now

    def _save(self, order: TrainOrder, saved: int) -> int:
        """Save the state where another version is live than the one that it was saved with."""
        # A step, or the end, of a process that was forked is none of the job's.
        end_forked_child(self._pid)
        # Until then nobody knows which version the state belongs to.
        self._attached.settle_transaction()
        live = self._attached.version
        if live == saved or not hasattr(self._trainer, "save_state"):
            return live
        folder = Path(f"{order.saving}{live}")
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(0o750)
        with self._users_code("save_state"):
            self._trainer.save_state(folder)
        if any(folder.iterdir()):
            sync_folder(folder)
            self._tell({"op": "saved", "version": live})
        else:
            folder.rmdir()
        return live


def _count(name: str, value: Any) -> int:
    number = int(value)
    if not 0 <= number < 1 << 63:
        msg = f"{name} of a Progress is {number}; it counts from 0"
        raise ValueError(msg)
    return number
