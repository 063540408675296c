"""How far the apply of a fleet is, on a terminal, while its caller waits for the outcome."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator

from weightsync_client.cli.plain_text import escaped
from weightsync_client.client import Client
from weightsync_client.errors import ClientError
from weightsync_client.fleet_types import FleetOrder, FleetReport

__all__ = ["describe", "fleet_progress"]

#: Each look costs the register a few lists.
_LOOK_S = 0.5


def describe(report: FleetReport) -> str:
    """Return how far an apply is, as one line."""
    members, barrier = report.members, report.order is FleetOrder.BARRIER
    counts = [f"{sum(one.prepared for one in members)} of {len(members)} prepared"]
    if barrier:
        counts.append(f"{sum(one.ready for one in members)} stand still")
    counts.append(f"{report.decisions} of {report.decisions_needed} decisions")
    counts.append(f"{sum(one.done for one in members)} live")
    refusals = [f"{one.name}: {one.reason}" for one in members if one.reason]
    decided = f", {report.decision}" if report.decision else ""
    why = f" ({refusals[0]})" if refusals else ""
    return f"apply {report.apply}, {report.order}: {', '.join(counts)}{decided}{why}"


def _steps(report: FleetReport) -> tuple[int, int]:
    """Return how many steps of its members are done, and how many there are."""
    barrier = report.order is FleetOrder.BARRIER
    done = sum(one.prepared + (barrier and one.ready) + one.done for one in report.members)
    return done, len(report.members) * (3 if barrier else 2)


@contextlib.contextmanager
def fleet_progress(client: Client) -> Iterator[None]:
    """Show the apply that the block asks for on stderr if that is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    # Only here: it costs a tenth of a second that nobody else needs.
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    console = Console(stderr=True)
    # What members say is text, and no markup.
    columns = TextColumn("{task.description}", markup=False), BarColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("the fleet is asked", total=None)

        def update(report: FleetReport) -> None:
            done, total = _steps(report)
            text = escaped(describe(report), sys.stderr.encoding)
            bar.update(task, description=text, completed=done, total=total)

        over = threading.Event()
        looking = threading.Thread(target=_look, args=(client, update, over), daemon=True)
        looking.start()
        try:
            yield
        finally:
            over.set()
            # One that waits for a register which does not answer holds nobody up.
            looking.join(_LOOK_S)


def _look(client: Client, update: Callable[[FleetReport], None], over: threading.Event) -> None:
    """Show each change of the apply that runs now, or is begun after this."""
    first: int | None = None
    while not over.is_set():
        # The outcome tells what is wrong; ValueError: it is there, and the client is closed.
        with contextlib.suppress(ClientError, ValueError):
            newest = client.fleet_status().newest
            number = newest.apply if newest is not None else 0
            if first is None:
                first = number + bool(newest is not None and newest.decision)
            if newest is not None and number >= first:
                update(newest)
        over.wait(_LOOK_S)
