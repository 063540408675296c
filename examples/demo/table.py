"""What the demo shows: a live table on a terminal, one plain line per version elsewhere."""

from __future__ import annotations

from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

__all__ = ["Row", "View"]

#: Fixed parts of a plain line; the text comes last, so that it may be of any length.
_PLAIN = "{:>7} {:>8} {:>9} {:>7} {:>8} {:>9} {:>8}  {}"
_TITLES = ("version", "loss", "sent", "of all", "push ms", "pause ms", "gap ms", "text")
_FRAME_LINES = 7


@dataclass
class Row:
    """One version.

    Attributes:
        version: Its number.
        loss: Of the trainer when it pushed.
        sent_bytes: What was sent: what changed, or for the first version everything.
        dense_bytes: What a push in full sends.
        push_s: From the call until the version was committed.
        pause_s: From the request to pause until the engine ran again.
        gap_s: Longest time that the client waited for a token, from the push until the next one.
        text: What the model says.
    """

    version: int
    loss: float
    sent_bytes: int
    dense_bytes: int
    push_s: float
    pause_s: float
    gap_s: float = 0.0
    text: str = ""

    def cells(self) -> tuple[str, ...]:
        """Return the columns as text."""
        return (
            str(self.version),
            f"{self.loss:.4f}",
            f"{self.sent_bytes / 1e6:.2f} MB",
            f"{self.sent_bytes / self.dense_bytes:.1%}",
            f"{self.push_s * 1e3:.1f}",
            f"{self.pause_s * 1e3:.1f}",
            f"{self.gap_s * 1e3:.1f}",
            _printable(self.text),
        )

    def line(self) -> str:
        """Return the columns as one line."""
        return _PLAIN.format(*self.cells())


class View:
    """Shows rows as they grow. The newest row may change until the next one is added.

    Args:
        console: Where to; a terminal gets a table that is redrawn.
        learned: The text that is shown in green.
    """

    def __init__(self, console: Console, learned: str) -> None:
        self._console = console
        self._learned = _printable(learned)
        self._rows: list[Row] = []
        self._open: Row | None = None
        self._status = ""
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=4)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()
        else:
            self._finish_row()

    def status(self, text: str) -> None:
        """Say what is going on; the newest row is final."""
        self._status = text
        if self._live is None:
            self._finish_row()
            self._plain(text)

    def add(self, row: Row) -> None:
        """Begin a row; the one before is final."""
        if self._live is None:
            if not self._rows:
                self._plain(_PLAIN.format(*_TITLES))
            self._finish_row()
        self._rows.append(row)
        self._open = row

    def _finish_row(self) -> None:
        if self._open is not None:
            self._plain(self._open.line())
            self._open = None

    def _plain(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        self._console.file.flush()

    def _render(self) -> Group:
        table = Table(expand=True)
        for title in _TITLES[:-1]:
            table.add_column(title, justify="right", no_wrap=True)
        table.add_column(_TITLES[-1], overflow="ellipsis", no_wrap=True, ratio=1)
        fit = max(3, self._console.height - _FRAME_LINES)
        for row in self._rows[-fit:]:
            *numbers, text = row.cells()
            style = "green" if text == self._learned else ""
            table.add_row(*numbers, Text(text, style=style))
        return Group(table, Text(self._status, style="dim"))


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "\N{MIDDLE DOT}" for letter in text).strip()
