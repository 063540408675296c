"""The program: commands, and errors as one sentence and an exit code."""

from __future__ import annotations

import logging
import math
import os
import re
import sys
import threading
from typing import Annotated

import typer

from weightsync import __version__
from weightsync.errors import Reason
from weightsync.wire.extras import missing_package
from weightsync_client.access import VARIABLES
from weightsync_client.cli import (
    fleet_commands,
    train_commands,
    up,
    version_commands,
    weight_commands,
)
from weightsync_client.cli.cli_options import (
    MEANINGS,
    ExitCode,
    as_commands,
    echo,
    escaped,
    exit_code,
)
from weightsync_client.errors import CALLS, ClientError

logger = logging.getLogger(__name__)

_TABLE = "\n".join(f"{code:>5}  {meaning}" for code, meaning in MEANINGS.items())
_ACCESS = "\n".join(f"  {variable:<22} {what}" for variable, (_, what) in VARIABLES.items())

_CALLS = {call: command for call, (_, command) in CALLS.items() if command}
#: By its name, or by the path that servers know it by.
_CALL = re.compile(rf"(?:/[\w.]+/)?\b({'|'.join(_CALLS)})\b")

app = typer.Typer(
    name="weightsync",
    help="Pushes weights to a weightsync-server, applies them and reads them back.",
    epilog=f"\b\nToken and TLS, by variables:\n{_ACCESS}\n\n\b\nExit codes:\n{_TABLE}",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
for command in (
    up.up,
    weight_commands.push,
    weight_commands.apply,
    weight_commands.rollback,
    version_commands.versions,
    version_commands.watch,
    version_commands.pull,
    version_commands.verify,
    version_commands.gate,
    version_commands.diff,
    version_commands.status,
    version_commands.applies,
    version_commands.pin,
    version_commands.delete,
    weight_commands.epoch,
    weight_commands.abort,
    train_commands.checkpoint,
):
    app.command()(command)
app.add_typer(train_commands.train)
app.add_typer(fleet_commands.fleet)


def _show_version(*, wanted: bool) -> None:
    if wanted:
        echo(__version__)
        raise typer.Exit


@app.callback()
def _root(
    *,
    address: Annotated[
        str | None, typer.Option(help="Same as after a command; applies to any command.")
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Same as after a command; applies to any command.")
    ] = None,
    _: Annotated[
        bool,
        typer.Option(
            "--version",
            help="Print the version.",
            callback=lambda value: _show_version(wanted=value),
            is_eager=True,
        ),
    ] = False,
) -> None:
    # What stands after the command goes before this, and this before the environment.
    for variable, value in (("WEIGHTSYNC_ADDRESS", address), ("WEIGHTSYNC_NAME", model)):
        if value is not None:
            os.environ[variable] = value


def _plain(message: str) -> str:
    return _CALL.sub(lambda found: f"`weightsync {_CALLS[found[1]]}`", as_commands(message))


def _fail(code: ExitCode, sentence: str) -> ExitCode:
    echo(f"weightsync: {sentence}", err=True, lines=True)
    return code


def _sentence(error: ClientError) -> str:
    # What a trainer's class raised is quoted as it is.
    quoted = error.reason is Reason.TRAINER_FAILED
    sentence = error.message if quoted else _plain(error.message)
    if error.retry_after_s is None:
        return sentence
    return f"{sentence} (try again after {max(1, math.ceil(error.retry_after_s))} s)"


class _LineFormatter(logging.Formatter):
    """Makes one line of a record, also of one with an exception."""

    def format(self, record: logging.LogRecord) -> str:
        message = as_commands(record.getMessage())
        if record.exc_info and (error := record.exc_info[1]) is not None:
            message = f"{message} ({type(error).__name__}: {error})"
        return f"weightsync: {escaped(message, sys.stderr.encoding)}"


def _log_thread(fault: threading.ExceptHookArgs) -> None:
    name = fault.thread.name if fault.thread else "?"
    error = fault.exc_value
    logger.warning("thread %s ended with %s: %s", name, fault.exc_type.__name__, error)


def _run() -> int:
    try:
        result = app(standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        return ExitCode.INTERRUPTED
    except ClientError as error:
        return _fail(exit_code(error), _sentence(error))
    except BrokenPipeError:
        # Whoever read the output has gone; the rest of it is nobody's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except Exception as error:
        if hasattr(error, "exit_code") and hasattr(error, "show"):
            # Wrong use. The class is click's or typer's own copy of it, as typer's release decides.
            error.show()
            return int(error.exit_code)
        logger.debug("the fault", exc_info=error)
        if isinstance(error, ModuleNotFoundError) and (
            sentence := missing_package(error, "this command")
        ):
            return _fail(ExitCode.USAGE, sentence)
        name = type(error).__name__
        return _fail(ExitCode.FAULT, f"{name}: {error}; this is a fault of weightsync, report it")
    return result if isinstance(result, int) else ExitCode.OK


def main() -> None:
    """Run `weightsync` and exit."""
    if os.environ.get("WEIGHTSYNC_LOG_LEVEL") == "DEBUG":
        logging.basicConfig(level=logging.DEBUG)
    else:
        # What libraries log is for people here, too: a line, and no traceback.
        handler = logging.StreamHandler()
        handler.setFormatter(_LineFormatter())
        logging.basicConfig(level=logging.WARNING, handlers=[handler])
    before, threading.excepthook = threading.excepthook, _log_thread
    try:
        sys.exit(_run())
    finally:
        threading.excepthook = before
