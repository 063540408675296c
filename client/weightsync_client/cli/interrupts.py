"""What an interrupt leaves, said before the command ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from weightsync_client.cli.plain_text import echo

__all__ = ["explain_interrupt"]


@contextlib.contextmanager
def explain_interrupt(otherwise: str) -> Iterator[None]:
    """Say in which state an interrupt leaves things; Typer keeps nothing of it but its exit code.

    Args:
        otherwise: What to say where nothing was noted.
    """
    try:
        yield
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", [otherwise]):
            echo(f"weightsync: interrupted; {note}", err=True)
        raise
