"""Commands about a whole fleet: status, members, apply, rollback, abort."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from weightsync.model.manifest import MAX_VERSION
from weightsync_client.cli import render
from weightsync_client.cli.cli_options import (
    Address,
    After,
    Cache,
    Json,
    Key,
    Model,
    Pause,
    Wait,
    connect,
    echo,
    escaped,
    set_pause,
)
from weightsync_client.client import Client
from weightsync_client.errors import ClientError
from weightsync_client.options import DEFAULT_ADDRESS, FleetApplyOptions, FleetChoices
from weightsync_client.types import FleetOrder, FleetReport, FleetStatus

#: Each look costs the register a few lists.
_LOOK_S = 0.5


def _named(report: FleetReport) -> str:
    order = "" if report.order is FleetOrder.UNSPECIFIED else f", {report.order}"
    return f"apply {report.apply}{order}"


def describe(report: FleetReport) -> str:
    members, barrier = report.members, report.order is FleetOrder.BARRIER
    counts = [f"{sum(one.prepared for one in members)} of {len(members)} prepared"]
    if barrier:
        counts.append(f"{sum(one.ready for one in members)} paused")
    counts.append(f"{report.decisions} of {report.decisions_needed} decisions")
    counts.append(f"{sum(one.done for one in members)} live")
    refusals = [f"{one.name}: {one.reason}" for one in members if one.reason]
    decided = f", {report.decision}" if report.decision else ""
    why = f" ({refusals[0]})" if refusals else ""
    return f"{_named(report)}: {', '.join(counts)}{decided}{why}"


def _steps(report: FleetReport) -> tuple[int, int]:
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
        task = bar.add_task("asking the fleet", total=None)

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


fleet = typer.Typer(
    name="fleet",
    help="Shows and makes the decisions of a fleet, through any member.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Order = Annotated[
    str,
    typer.Option(
        "--order",
        help="rolling (wave by wave, while the others generate) or barrier (all paused until one "
        "decision).",
    ),
]
_MaxUnavailable = Annotated[
    int,
    typer.Option(
        "--max-unavailable",
        min=0,
        help="With --order rolling: members unavailable at once.",
        show_default="the server's setting",
    ),
]
_Timeout = Annotated[float | None, typer.Option("--timeout", help="Longest wait, in seconds.")]


@fleet.command()
def status(*, address: Address = DEFAULT_ADDRESS, model: Model = None, json: Json = False) -> None:
    """Show what is decided, the progress of the newest apply, and the state of members."""
    with connect(address, model) as client:
        found = client.fleet_status()
    if json:
        render.show_json(found)
        return
    decided = f"version {found.decided_version}" if found.decided_version else "nothing"
    echo(f"fleet {found.fleet}: {decided} is decided, skew {found.skew}")
    age = "never since it started" if found.read_age_s is None else f"{found.read_age_s:.1f} s ago"
    echo(f"register {found.register}, read by {found.member} {age}")
    if found.newest is not None:
        _show_report(found.newest)
    _show_members(found)


@fleet.command()
def members(*, address: Address = DEFAULT_ADDRESS, model: Model = None, json: Json = False) -> None:
    """List the members that are present, and their versions."""
    with connect(address, model) as client:
        found = client.fleet_status()
    render.show_json(list(found.members)) if json else _show_members(found)


@fleet.command()
def apply(
    version: Annotated[int, typer.Argument(min=1, max=MAX_VERSION, help="Version number.")],
    *,
    clear_rejected: Annotated[
        bool,
        typer.Option("--clear-rejected", help="Make all members accept a rejected version again."),
    ] = False,
    order: _Order = "rolling",
    max_unavailable: _MaxUnavailable = 0,
    pause: Pause = None,
    cache: Cache = None,
    wait_timeout: Wait = None,
    after_wait: After = "keep",
    timeout: _Timeout = None,
    key: Key = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Make a version live on every member, or on none. Shows progress on a terminal."""
    asked = _choices(order, max_unavailable, timeout)
    choices = FleetApplyOptions(**asked, clear_rejected=clear_rejected)
    set_pause(choices, pause, cache, wait_timeout, after_wait, key)
    with connect(address, model) as client, fleet_progress(client):
        report = client.fleet_apply(version, **choices)
    render.show_json(report) if json else _show_report(report)


@fleet.command()
def rollback(
    *,
    reason: Annotated[str, typer.Option(help="Why, for logs.")] = "",
    order: _Order = "rolling",
    max_unavailable: _MaxUnavailable = 0,
    pause: Pause = None,
    cache: Cache = None,
    wait_timeout: Wait = None,
    after_wait: After = "keep",
    timeout: _Timeout = None,
    key: Key = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Go back to the version of the previous commit, and reject the current one, on all members."""
    choices = _choices(order, max_unavailable, timeout)
    set_pause(choices, pause, cache, wait_timeout, after_wait, key)
    with connect(address, model) as client, fleet_progress(client):
        report = client.fleet_rollback(reason, **choices)
    render.show_json(report) if json else _show_report(report)


@fleet.command()
def abort(
    *,
    reason: Annotated[str, typer.Option(help="Why, for logs and status.")] = "",
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Abort the running apply or rollback. An earlier decision stands."""
    with connect(address, model) as client:
        report = client.fleet_abort(reason)
    if json:
        render.show_json(report)
    elif report is None:
        echo("no apply of the fleet is running, so none was aborted; see `fleet status`")
    else:
        _show_report(report)


def _choices(order: str, max_unavailable: int, timeout: float | None) -> FleetChoices:
    choices = FleetChoices(order=order)
    if max_unavailable:
        choices["max_unavailable"] = max_unavailable
    if timeout is not None:
        choices["timeout_s"] = timeout
    return choices


def _show_report(report: FleetReport) -> None:
    done = sum(one.done for one in report.members)
    why = f" ({report.reason})" if report.reason else ""
    asked = f", a rollback because: {report.rollback_reason}" if report.rollback_reason else ""
    echo(
        f"{_named(report)}: {report.decision or 'not decided'}{why}, version "
        f"{report.version}, {report.decisions} of {report.decisions_needed} decisions, live on "
        f"{done} of {len(report.members) + len(report.fenced_others)} members{asked}"
    )
    for one in report.members:
        if not one.done or one.reason:
            far = "still" if one.ready else "prepared" if one.prepared else "not prepared"
            note = f": {one.reason}" if one.reason else ""
            echo(f"  {one.name}: {'done' if one.done else far}{note}")
    for name in report.fenced_others:
        echo(f"  {name}: fenced, and no part of this apply; see `weightsync fleet members`")


def _show_members(found: FleetStatus) -> None:
    for one in found.members:
        what = f"version {one.live_version} {one.content_digest}" if one.live_version else "nothing"
        number = f" {one.release}" if one.release else ""
        release = f", of an older release{number}: update it" if one.older else ""
        state = f"{one.state} ({one.reason})" if one.reason else one.state
        echo(f"{one.name}: {state}, {what}, {one.address or 'no address'}{release}")
