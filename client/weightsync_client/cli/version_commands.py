"""Commands about versions: what there is, what is live and proved, what changed."""

from __future__ import annotations

import dataclasses
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from weightsync.errors import Reason
from weightsync.model.manifest import MAX_VERSION
from weightsync_client import types
from weightsync_client.checkpoint_diff import CheckpointDiff, compare, largest
from weightsync_client.cli import render
from weightsync_client.cli.cli_options import (
    Address,
    EngineName,
    ExitCode,
    Json,
    Model,
    Version,
    connect,
    echo,
    escaped,
)
from weightsync_client.errors import refuse
from weightsync_client.gate import GateOutcome
from weightsync_client.options import DEFAULT_ADDRESS, SHARD_BYTES
from weightsync_client.source.source import Source, make_source

_Version = Annotated[
    int, typer.Argument(min=0, max=MAX_VERSION, help="Version number; 0: the live one.")
]


def versions(
    version: Annotated[
        int | None,
        typer.Argument(min=0, max=MAX_VERSION, help="Show only this version; 0: the live one."),
    ] = None,
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """List versions, newest first. With a number, show only that one."""
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
    """Print versions, then each change, until interrupted; --json prints one line per change."""
    with connect(address, model) as client:
        for change in client.watch():
            if json:
                render.show_json(change, lines=True)
            else:
                render.show_version(change.version, "deleted" if change.deleted else "")


def pull(
    folder: Annotated[Path, typer.Argument(help="A new or empty folder.")],
    version: _Version = 0,
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Write a version to a folder. It appears whole and verified, or not at all."""
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
    """Prove what every rank serves. Exit code 6: a rank serves something else."""
    with connect(address, model) as client:
        result = client.verify(version, engine=engine)
    if json:
        render.show_json(result)
    else:
        render.show_verification(result)
    if not result.verified:
        raise typer.Exit(ExitCode.DATA)


def gate(
    version: _Version = 0,
    *,
    engine: EngineName = "",
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Score the probes of what is live, beside generation, and prove it.

    Exit code 6: a score is over its limit, or a rank serves something else.
    """
    with connect(address, model) as client:
        result = client.verify(version, engine=engine, score=True)
    render.show_json(result) if json else render.show_gates(result)
    scored = [one.gate for one in result.engines if one.gate is not None]
    if not result.verified or any(one.outcome is not GateOutcome.PASSED for one in scored):
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
        typer.Option(help="Ask grpc.health.v1 for the service 'push' or 'serving' instead."),
    ] = None,
    exit_code: Annotated[
        bool, typer.Option("--exit-code", help="For health checks: exit with 5 if not serving.")
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Show the state of the server."""
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


def applies(
    *,
    last: Annotated[int, typer.Option(min=0, help="At most this many; 0: all.")] = 20,
    version: Annotated[
        int | None,
        typer.Option(min=1, max=MAX_VERSION, help="Only applies to this version or from it."),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """List the last applies, newest first: who asked, what was done, how long it took, and why."""
    with connect(address, model) as client:
        found = client.applies(last, version=version or 0)
    render.show_json(found) if json else render.show_applies(found)


def pin(
    version: Version,
    *,
    undo: Annotated[bool, typer.Option("--undo", help="Unpin it instead.")] = False,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Protect a version from garbage collection."""
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
            help="Also delete the version that a rollback would apply, and one that the fleet "
            "needs.",
        ),
    ] = False,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
) -> None:
    """Delete a version. Refused if it is live, staged for an apply, pinned or a base."""
    with connect(address, model) as client:
        client.delete(version, force=force)
    echo(f"version {version} deleted")


_ROWS = 30
# More than a row with the longest name of a tensor takes.
_WIDE = 2000


def diff(
    before: Annotated[
        str, typer.Argument(help="A checkpoint (file or folder), or a version number.")
    ],
    after: Annotated[str, typer.Argument(help="The checkpoint or version to compare it with.")],
    *,
    rows: Annotated[
        int, typer.Option(min=0, help="Tensors to list, most changed first; 0: none.")
    ] = _ROWS,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Show what changed from one checkpoint to another, and the size of a delta between them.

    A number that is not a path is a version of the server; it is pulled into a temporary folder.
    """
    with ExitStack() as stack:
        sources = [_source(given, address, model, stack) for given in (before, after)]
        found = compare(*sources)
    if json:
        render.show_json(found)
    else:
        _show(found, rows)


def _source(given: str, address: str, model: str | None, stack: ExitStack) -> Source:
    path = Path(given)
    if given.isdecimal() and not path.exists() and int(given[:30]) <= MAX_VERSION:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="weightsync-diff-")))
        with connect(address, model) as client, render.progress(f"pull {given}") as update:
            client.pull(path, int(given), on_progress=update)
    return make_source(path, SHARD_BYTES)


def _show(found: CheckpointDiff, rows: int) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # A program or a file gets whole names, not what fits into 80 columns.
        console.width = _WIDE
    table = Table("tensor", "dtype", box=None)
    for title in ("elements", "changed", "coding", "delta", "zstd", "dense"):
        table.add_column(title, justify="right")
    for tensor in largest(found, rows):
        table.add_row(
            escaped(tensor.name),
            escaped(tensor.dtype),
            str(tensor.elements),
            f"{tensor.changed / tensor.elements:.3%}",
            tensor.coding,
            render.size(tensor.delta_bytes),
            render.size(tensor.packed_bytes),
            render.size(tensor.dense_bytes),
        )
    if table.row_count:
        console.print(table)
    changed = sum(tensor.changed > 0 for tensor in found.tensors)
    console.print(
        f"{found.changed} of {found.elements} elements changed ({found.changed_fraction:.4%}), "
        f"in {changed} of {len(found.tensors)} tensors"
    )
    # Where nothing changed, a delta has no byte of tensors.
    less = f": 1/{found.dense_bytes / found.packed_bytes:.0f}" if found.packed_bytes else ""
    console.print(
        f"delta {render.size(found.delta_bytes)}, with zstd {render.size(found.packed_bytes)}, "
        f"dense {render.size(found.dense_bytes)}{less}"
    )
    for coding, count in sorted(found.bytes_by_coding.items()):
        console.print(f"  {coding:>12} {render.size(count):>10}")
    _show_distances(console.print, found)
    for what, names in (
        ("only in the first", found.only_before),
        ("only in the second", found.only_after),
        ("of another dtype or shape", found.reshaped),
    ):
        for name in names:
            console.print(f"{what}: {escaped(name)}")


def _show_distances(echo: Callable[[str], None], found: CheckpointDiff) -> None:
    counted = sum(found.distances.values())
    if counted:
        echo("distance in ulps, of changed elements")
    for name, count in found.distances.items():
        bar = "#" * round(40 * count / counted)
        echo(f"  {name:>12} {count / counted:>8.3%} {bar}")
