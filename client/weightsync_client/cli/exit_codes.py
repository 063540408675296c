"""Exit codes of `weightsync`: one table, shown by --help."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType

from weightsync.errors import Reason
from weightsync_client.errors import (
    AbortedError,
    ClientError,
    DataError,
    DeadlineError,
    DeniedError,
    ExhaustedError,
    InvalidError,
    NotFoundError,
    RefusedError,
    UnavailableError,
)

__all__ = ["MEANINGS", "ExitCode", "exit_code"]


class ExitCode(enum.IntEnum):
    """How the command ended."""

    OK = 0
    FAULT = 1
    USAGE = 2
    NOT_FOUND = 3
    REFUSED = 4
    UNAVAILABLE = 5
    DATA = 6
    EXHAUSTED = 7
    TIMEOUT = 8
    DENIED = 9
    INTERRUPTED = 130


MEANINGS: Mapping[ExitCode, str] = MappingProxyType(
    {
        ExitCode.OK: "done",
        ExitCode.FAULT: "a fault of this program",
        ExitCode.USAGE: "wrong use: correct the command",
        ExitCode.NOT_FOUND: "no such model, version or push",
        ExitCode.REFUSED: "refused in the present state: do what the message says",
        ExitCode.UNAVAILABLE: "server, engine or link away, or not serving: try again later",
        ExitCode.DATA: "wrong layout or digest, or other weights are live than expected",
        ExitCode.EXHAUSTED: "out of slots, memory or disk",
        ExitCode.TIMEOUT: "took longer than its timeout",
        ExitCode.DENIED: "the token is missing, wrong or lacks the role",
        ExitCode.INTERRUPTED: "interrupted",
    }
)

_DATA_REASONS = (Reason.LAYOUT_INVALID, Reason.SHARD_INVALID, Reason.DIGEST_MISMATCH)

_CODES: Mapping[type[ClientError], ExitCode] = MappingProxyType(
    {
        InvalidError: ExitCode.USAGE,
        NotFoundError: ExitCode.NOT_FOUND,
        RefusedError: ExitCode.REFUSED,
        AbortedError: ExitCode.REFUSED,
        ExhaustedError: ExitCode.EXHAUSTED,
        UnavailableError: ExitCode.UNAVAILABLE,
        DeadlineError: ExitCode.TIMEOUT,
        DeniedError: ExitCode.DENIED,
        DataError: ExitCode.DATA,
    }
)


def exit_code(error: ClientError) -> ExitCode:
    """Return the exit code for an error."""
    if error.reason in _DATA_REASONS:
        return ExitCode.DATA
    return _CODES[type(error)]
