"""Shows hosts and versions: a table that is redrawn in a terminal, a line for each change else."""

from __future__ import annotations

import threading
import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from examples.fleet_demo.watcher import AWAY, Seen, Watcher

__all__ = ["View"]

_TITLES = ("host", "state", "live", "newest here", "decided", "members seen")
_EVERY_S = 0.2
_FRAME_LINES = 10
_COLUMN = 14


class View:
    """What the watcher has seen, and what the demo does, until the block ends.

    Args:
        console: Where to.
        watcher: Knows what each host says.
    """

    def __init__(self, console: Console, watcher: Watcher) -> None:
        self._console = console
        self._watcher = watcher
        self._begun = time.monotonic()
        self._said: list[str] = []
        self._line = ""
        self._over = threading.Event()
        self._printing = threading.Lock()
        self._live = (
            Live(console=console, get_renderable=self._render, refresh_per_second=4)
            if console.is_terminal
            else None
        )
        self._thread = threading.Thread(target=self._follow, name="table", daemon=True)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        else:
            names = "".join(f"{name:<{_COLUMN}}" for name in self._watcher.seen)
            self._print(f"{'seconds':>7}  {names}decided")
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._live is not None:
            self._live.stop()
        else:
            self._thread.join()

    def say(self, text: str) -> None:
        """Tell what the demo does."""
        line = f"{self._seconds()}  {text}"
        if self._live is None:
            self._print(line)
        else:
            self._said.append(line)

    def _seconds(self) -> str:
        return f"{time.monotonic() - self._begun:7.1f}"

    def _follow(self) -> None:
        while not self._over.wait(_EVERY_S):
            self._print_change()
        self._print_change()

    def _print_change(self) -> None:
        seen = self._watcher.seen
        cells = "".join(f"{_cell(one):<{_COLUMN}}" for one in seen.values())
        line = f"{cells}{_decided(seen)}"
        if line != self._line:
            self._line = line
            self._print(f"{self._seconds()}  {line}")

    def _print(self, line: str) -> None:
        with self._printing:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
            self._console.file.flush()

    def _render(self) -> Group:
        table = Table()
        for title in _TITLES:
            table.add_column(title, no_wrap=True)
        for name, one in self._watcher.seen.items():
            style = "red" if one.state == AWAY else "green" if _agrees(one) else ""
            numbers = (one.live, one.newest, one.decided, one.members)
            table.add_row(name, one.state, *map(_number, numbers), style=style)
        fit = max(3, self._console.height - _FRAME_LINES)
        return Group(table, Text("\n".join(self._said[-fit:])))


def _cell(one: Seen) -> str:
    if one.state == AWAY:
        return AWAY
    # The origin has no engine: what it has is what was pushed.
    return f"{one.live} {one.state}" if one.members else f"has {one.newest}"


def _decided(seen: dict[str, Seen]) -> str:
    return _number(max(one.decided for one in seen.values()))


def _agrees(one: Seen) -> bool:
    return bool(one.decided) and one.live == one.decided


def _number(value: int) -> str:
    return str(value) if value else "-"
