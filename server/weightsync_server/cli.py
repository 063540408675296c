"""weightsync-server: settings from flags and environment, then run until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import logging
import signal
import sys
from typing import TYPE_CHECKING

from weightsync import __version__, log_lines
from weightsync.errors import WeightSyncError
from weightsync.log_lines import event
from weightsync.wire.extras import missing_package
from weightsync_server.ops.stop_deadline import StopDeadline

try:
    from pydantic import ValidationError
    from pydantic_settings import CliApp, SettingsError

    from weightsync_server.flags import Flags, help_text
except ModuleNotFoundError as error:
    # This is a program, whose import is its start.
    if not (absent := missing_package(error, "weightsync-server")):
        raise
    sys.exit(absent)

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

    from weightsync_server.app import App
    from weightsync_server.replicate.node_server import NodeServer
    from weightsync_server.settings import Settings


logger = logging.getLogger("weightsync_server")

#: Exit codes: stopped as asked, could not start, wrong flag or setting, nobody could connect, was
#: ended because it did not stop.
_OK, _FAILED, _USAGE, _SHUT, _UNFINISHED = 0, 1, 2, 3, 4
#: Seconds that calls get when nobody else can connect until this server has started again.
_SHUT_DRAIN_S = 4.0


def main() -> None:
    """Run the server; exits with 0 after a signal, 1 if it could not start, 2 for bad settings.

    It exits with 3 when gRPC has stopped letting callers in: whoever runs it starts it again. And
    with 4 when it did not stop in time, and was ended.

    `weightsync-server token new` prints a fresh token and its line for the authority file instead,
    `--version` the version, `--help` the settings.
    """
    if sys.argv[1:] == ["token", "new"]:
        _print_token()
        return
    arguments, engine_args = _split(sys.argv[1:])
    if "--version" in arguments:
        print(__version__)
        return
    if {"--help", "-h"} & set(arguments):
        print(help_text(), end="")
        return
    try:
        settings = CliApp.run(Flags, cli_args=arguments).tree
    except ValidationError as error:
        for problem in error.errors():
            sys.stderr.write(f"weightsync-server: {_sentence(problem)}\n")
        sys.exit(_USAGE)
    except SettingsError as error:
        sentence = str(error).removeprefix("error parsing CLI: ")
        sys.stderr.write(
            f"weightsync-server: {sentence}; `weightsync-server --help` lists all flags\n"
        )
        sys.exit(_USAGE)
    # Tells where a library has crashed.
    faulthandler.enable()
    log_lines.configure(settings.log_format, settings.log_level, settings.name)
    sys.exit(asyncio.run(_run(settings, engine_args)))


def _print_token() -> None:
    from weightsync_server.auth.principals import new_token, token_hash

    token = new_token()
    print(f"# For the client, in WEIGHTSYNC_TOKEN or a file of mode 0600; shown only now:\n{token}")
    print(f'# For its principal in the authority file:\ntokens = ["{token_hash(token)}"]')


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    middle = arguments.index("--")
    return arguments[:middle], arguments[middle + 1 :]


def _sentence(problem: ErrorDetails) -> str:
    """Return what is wrong with which setting; what several settings are about names them."""
    sentence = problem["msg"].removeprefix("Value error, ")
    field = ".".join(map(str, problem["loc"]))
    return f"{field}: {sentence}" if field else sentence


async def _run(settings: Settings, engine_args: list[str]) -> int:
    asked = asyncio.Event()
    deadline = StopDeadline(_UNFINISHED)
    loop = asyncio.get_running_loop()

    def ask(*_: object) -> None:
        # Not by the loop, which may stand still: its own handlers would never be called.
        deadline.begin(settings.drain_timeout_s + settings.stop_timeout_s, loop)
        # A signal may come again when the loop has been closed.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(asked.set)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, ask)
    try:
        app = _made(settings, engine_args)
        if not await _started(app, asked):
            return _OK
    except ModuleNotFoundError as error:
        if not (sentence := missing_package(error, "this configuration")):
            raise
        return _failed(settings, sentence)
    except (WeightSyncError, OSError, RuntimeError) as error:
        return _failed(settings, str(error))
    shut = await _until_end(app, asked)
    if shut:
        logger.critical(
            "no client can connect any more (%s): exiting, to be restarted",
            shut,
            extra=event("server.shut"),
        )
        deadline.begin(_SHUT_DRAIN_S + settings.stop_timeout_s, loop)
        await app.stop(_SHUT_DRAIN_S)
        return _SHUT
    logger.info(
        "stopping: running calls get %g s to finish",
        settings.drain_timeout_s,
        extra=event("server.stopping"),
    )
    await app.stop()
    logger.info("stopped", extra=event("server.stopped"))
    return _OK


def _failed(settings: Settings, sentence: str) -> int:
    if settings.log_format == log_lines.JSON:
        logger.critical("%s", sentence, extra=event("server.failed"))
    else:
        sys.stderr.write(f"weightsync-server: {sentence}\n")
    return _FAILED


async def _started(app: App | NodeServer, asked: asyncio.Event) -> bool:
    """Return whether it has started; else it was asked to stop before, and nothing is left of it.

    Raises:
        WeightSyncError, OSError, RuntimeError: It cannot.
    """
    starting = asyncio.create_task(app.start())
    asking = asyncio.create_task(asked.wait())
    await asyncio.wait((starting, asking), return_when=asyncio.FIRST_COMPLETED)
    asking.cancel()
    if not starting.done():
        logger.info(
            "the server was asked to stop while it was starting", extra=event("server.stopping")
        )
        starting.cancel()
        await asyncio.wait([starting])
    if starting.cancelled():
        return False
    starting.result()
    return True


def _made(settings: Settings, engine_args: list[str]) -> App | NodeServer:
    # After the settings are good: importing grpc takes as long as everything before.
    if settings.replica.head:
        return _node_server(settings)
    from weightsync_server.app import App

    return App(settings, engine_args)


def _node_server(settings: Settings) -> NodeServer:
    from weightsync_server.auth.tls import ClientTls
    from weightsync_server.replicate.grpc_source import OriginAccess
    from weightsync_server.replicate.node_server import NodeServer

    node = settings.replica
    tls = ClientTls(node.ca, node.certificate, node.key, "the head")
    head = OriginAccess(node.head, tls, node.token_file)
    return NodeServer(head, node.rank, settings.paths.segment_socket)


async def _until_end(app: App | NodeServer, asked: asyncio.Event) -> str:
    """Return why nobody can connect any more; empty: it was asked to stop."""
    shut = asyncio.create_task(app.shut())
    asking = asyncio.create_task(asked.wait())
    await asyncio.wait((shut, asking), return_when=asyncio.FIRST_COMPLETED)
    for task in (shut, asking):
        task.cancel()
    return "" if asking.done() else shut.result()


if __name__ == "__main__":
    main()
