"""Text for a terminal: no name, whoever gave it, can do more there than stand on its line."""

from __future__ import annotations

import sys
from typing import Any

import typer

__all__ = ["echo", "escaped"]


def escaped(text: str, encoding: str | None = None, *, lines: bool = False) -> str:
    """Return text with an escape for each character that is no print, or that cannot be shown.

    Args:
        text: What is to be shown; names in it may hold anything.
        encoding: Of the terminal or file; None: that of stdout.
        lines: Line ends and tabs are kept.
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
