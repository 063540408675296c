"""Commands that read and tend versions: versions, watch, pull, verify, status, pin, delete."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import typer

from weightsync.errors import Reason
from weightsync.model.manifest import MAX_VERSION
from weightsync_client import types
from weightsync_client.cli import render
from weightsync_client.cli.cli_options import Address, EngineName, Json, Model, Version, connect
from weightsync_client.cli.exit_codes import ExitCode
from weightsync_client.cli.plain_text import echo
from weightsync_client.errors import refuse
from weightsync_client.options import DEFAULT_ADDRESS

__all__ = ["delete", "pin", "pull", "status", "verify", "versions", "watch"]

_Version = Annotated[int, typer.Argument(min=0, max=MAX_VERSION, help="Version; 0: the live one.")]


def versions(
    version: Annotated[
        int | None,
        typer.Argument(min=0, max=MAX_VERSION, help="Only this one; 0: the live one."),
    ] = None,
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """List versions, newest first. With a number, only that one."""
    with connect(address, model) as client:
        found = client.versions() if version is None else [client.get_version(version)]
    if json:
        render.show_json(found if version is None else found[0])
    else:
        render.show_versions(found)


def watch(
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Print versions and each change. Ends when interrupted; --json prints a line each."""
    with connect(address, model) as client:
        for change in client.watch():
            if json:
                render.show_json(change, lines=True)
            else:
                render.show_version(change.version, "deleted" if change.deleted else "")


def pull(
    folder: Annotated[Path, typer.Argument(help="A folder that does not exist, or is empty.")],
    version: _Version = 0,
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write a version to a folder. It appears whole and proved, or not at all."""
    with connect(address, model) as client, render.progress("pull") as update:
        result = client.pull(folder, version, on_progress=update)
    if json:
        render.show_json(result)
    else:
        echo(
            f"version {result.version.version} in {folder}: {len(result.files)} files, "
            f"{render.size(result.size_bytes)}, content {result.version.content_digest}"
        )


def verify(
    version: _Version = 0,
    *,
    engine: EngineName = "",
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Prove what every rank serves. Exit code 6: not what it should."""
    with connect(address, model) as client:
        result = client.verify(version, engine=engine)
    if json:
        render.show_json(result)
    else:
        render.show_verification(result)
    if not result.verified:
        raise typer.Exit(ExitCode.DATA)


def _only(status: types.Status, model: str | None) -> types.Status:
    """Return a status with the model that was asked for alone; without one, all are shown."""
    models = [one for one in status.models if not model or one.model == model]
    if model and not models:
        names = ", ".join(repr(one.model) for one in status.models)
        raise refuse(
            Reason.MODEL_UNKNOWN, f"model {model!r} is not configured; this server has {names}"
        )
    return dataclasses.replace(status, models=tuple(models))


def status(
    *,
    service: Annotated[
        str | None,
        typer.Option(help="Ask grpc.health.v1 about 'push' or 'serving' instead."),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="For health checks: 5 when not serving.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Tell the state of the server."""
    with connect(address, model) as client:
        if not exit_code and service is None:
            found = _only(client.status(), model)
            render.show_json(found) if json else render.show_status(found)
            return
        serving = client.health(service or "")
    if json:
        render.show_json({"service": service or "", "serving": serving})
    else:
        echo(f"{service or 'server'}: {'serving' if serving else 'not serving'}")
    if exit_code and not serving:
        raise typer.Exit(ExitCode.UNAVAILABLE)


def pin(
    version: Version,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Let it go instead.")] = False,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Keep a version from being collected."""
    with connect(address, model) as client:
        found = client.pin(version, pinned=not undo)
    render.show_json(found) if json else render.show_version(found)


def delete(
    version: Version,
    *,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also the version that a rollback would go back to, and what the fleet needs.",
        ),
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
) -> None:
    """Delete a version. Refused if it is live, staged for an apply, pinned or a base."""
    with connect(address, model) as client:
        client.delete(version, force=force)
    echo(f"version {version} deleted")
