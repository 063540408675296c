"""What commands share: options, the client they make, text for a terminal, exit codes."""

from __future__ import annotations

import contextlib
import enum
import re
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Annotated, Any

import typer

from weightsync.errors import Reason
from weightsync.model.manifest import MAX_VERSION
from weightsync_client.client import Client
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
from weightsync_client.options import DEFAULT_ADDRESS, PauseChoices


def escaped(text: str, encoding: str | None = None, *, lines: bool = False) -> str:
    """Return text with escapes for characters that cannot be printed or encoded.

    `encoding` is that of the terminal or file; None means stdout's. With `lines`, line ends and
    tabs are kept.
    """
    kept = "\n\t" if lines else ""
    shown = "".join(
        char if char.isprintable() or char in kept else ascii(char)[1:-1] for char in text
    )
    name = encoding or sys.stdout.encoding or "ascii"
    return shown.encode(name, "backslashreplace").decode(name, "replace")


def echo(text: str = "", *, err: bool = False, lines: bool = False) -> None:
    """Print a line, escaped; see `escaped`."""
    stream: Any = sys.stderr if err else sys.stdout
    typer.echo(escaped(text, getattr(stream, "encoding", None), lines=lines), err=err)


Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="WEIGHTSYNC_ADDRESS",
        help="Server address, HOST:PORT or unix:PATH.",
        show_default=DEFAULT_ADDRESS,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="WEIGHTSYNC_NAME",
        help="Model name; not needed if the server has one model.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Key = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key: a repeated call with this key joins the first."),
]
Pause = Annotated[
    str | None,
    typer.Option(
        "--pause",
        help="Requests in flight: keep, wait (finish first) or abort; or between_steps: no pause.",
        show_default="keep",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--cache",
        help="Cached keys of the old weights: recompute (requests in flight compute theirs again; "
        "exact; default), keep (they read their own, and no other request does; default with "
        "--pause between_steps) or share (every request reads them: not exact).",
    ),
]
Wait = Annotated[
    float | None, typer.Option("--wait-timeout", help="With --pause wait: seconds to wait.")
]
Version = Annotated[int, typer.Argument(min=0, max=MAX_VERSION, help="Version number.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine", help="Only this engine, by its name in `weightsync status`.", show_default="all"
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        "--order",
        help="Several engines: together (all in one pause) or rolling (in turn, while the others "
        "generate).",
        show_default="together",
    ),
]
MaxUnavailable = Annotated[
    int,
    typer.Option(
        "--max-unavailable",
        min=0,
        help="With --order rolling: engines unavailable at once.",
        show_default="1",
    ),
]
After = Annotated[
    str, typer.Option("--after-wait", help="With --pause wait: keep or abort, after the wait.")
]


def connect(address: str, model: str | None) -> Client:
    """Return a client; token and TLS come from the environment, as all users see arguments."""
    return Client(address or DEFAULT_ADDRESS, model=model or None)


def set_pause(
    choices: PauseChoices,
    pause: str | None,
    cache: str | None,
    wait_timeout: float | None,
    after_wait: str,
    key: str | None,
) -> None:
    if pause is not None:
        choices["pause"] = pause
    if cache is not None:
        choices["cache"] = cache
    if wait_timeout is not None:
        choices["wait_timeout_s"] = wait_timeout
    if pause == "wait":
        choices["after_wait"] = after_wait
    if key:
        choices["idempotency_key"] = key


@contextlib.contextmanager
def explain_interrupt(otherwise: str) -> Iterator[None]:
    """Print in which state an interrupt leaves things, or `otherwise` if nothing was noted."""
    try:
        yield
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", [otherwise]):
            echo(f"weightsync: interrupted; {note}", err=True)
        raise


class ExitCode(enum.IntEnum):
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
        ExitCode.FAULT: "a bug in this program",
        ExitCode.USAGE: "wrong usage: correct the command",
        ExitCode.NOT_FOUND: "no such model, version or push",
        ExitCode.REFUSED: "refused as things are now: the message says what to do first",
        ExitCode.UNAVAILABLE: "server, engine or network is down, or not serving: try again later",
        ExitCode.DATA: "wrong layout or digest, or the live weights are not the expected ones",
        ExitCode.EXHAUSTED: "out of slots, memory or disk",
        ExitCode.TIMEOUT: "timed out",
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
    if error.reason in _DATA_REASONS:
        return ExitCode.DATA
    return _CODES[type(error)]


# Remedies of the server, which knows calls and fields of the protocol, and of the client, which
# knows Python, as this command does them.
_COMMANDS = {
    "unpin it first": "unpin it first with `weightsync pin --undo`",
    "set clear_rejected to": "give --clear-rejected to",
    "delete it with force": "delete it with --force",
    r"call acquire_epoch\(\)(?: \(`weightsync epoch`\))?": "run `weightsync epoch`",
    r"give epoch=(\d+)": r"give --epoch \1",
    r"without dtype='(\w+)'": r"without --dtype \1",
    "without check_finite": "without --check-finite",
    "with base=": "with --keep",
    r"give pause\.wait_timeout": "give --wait-timeout",
    "use order ROLLING": "use --order rolling",
    "push with probes=": "push with --probes",
}


def as_commands(message: str) -> str:
    """Return a message with its remedies as commands do them."""
    for words, command in _COMMANDS.items():
        message = re.sub(words, command, message)
    return message
