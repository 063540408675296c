"""The command that compares two checkpoints or versions: diff."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from weightsync.model.manifest import MAX_VERSION
from weightsync_client.checkpoint_diff import CheckpointDiff, compare, largest
from weightsync_client.cli import render
from weightsync_client.cli.cli_options import Address, Json, Model, connect
from weightsync_client.cli.plain_text import escaped
from weightsync_client.options import DEFAULT_ADDRESS, SHARD_BYTES
from weightsync_client.source.source import Source, make_source

__all__ = ["diff"]

_ROWS = 30
# More than a row with the longest name of a tensor takes.
_WIDE = 2000


def diff(
    before: Annotated[str, typer.Argument(help="A checkpoint (file or folder), or a version.")],
    after: Annotated[str, typer.Argument(help="What it is compared with: another one.")],
    *,
    rows: Annotated[
        int, typer.Option(min=0, help="Tensors to list, most changed first; 0: none.")
    ] = _ROWS,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Tell what changed from one checkpoint to another, and what a delta of them takes.

    A number that is no path is a version of the server: it is pulled into a temporary folder.
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
