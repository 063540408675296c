"""What is said of a class of the user that raised."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Iterator
from typing import Any

from weightsync.errors import Reason, WeightSyncError

__all__ = ["UserClassError", "failure_of", "users_code"]

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
