"""Commands about a whole fleet: status, members, apply, rollback, abort."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsync.model.manifest import MAX_VERSION
from weightsync_client import fleet_types as types
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
    set_pause,
)
from weightsync_client.cli.fleet_progress import fleet_progress
from weightsync_client.cli.plain_text import echo
from weightsync_client.options import DEFAULT_ADDRESS, FleetApplyOptions, FleetChoices

__all__ = ["fleet"]

fleet = typer.Typer(
    name="fleet",
    help="Tells what a fleet has decided, and decides; any member may be asked.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

_Order = Annotated[
    str,
    typer.Option(
        "--order",
        help="rolling (wave by wave, while the others generate) or barrier (all stand still until "
        "one decision).",
    ),
]
_MaxUnavailable = Annotated[
    int,
    typer.Option(
        "--max-unavailable",
        min=0,
        help="With --order rolling: members away at once.",
        show_default="as the server is set",
    ),
]
_Timeout = Annotated[float | None, typer.Option("--timeout", help="Longest wait in seconds.")]


@fleet.command()
def status(*, address: Address = DEFAULT_ADDRESS, model: Model = None, json: Json = False) -> None:
    """Tell what is decided, how far the newest apply has come, and where members are."""
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
    """List the members that are there, with what they hold."""
    with connect(address, model) as client:
        found = client.fleet_status()
    render.show_json(list(found.members)) if json else _show_members(found)


@fleet.command()
def apply(
    version: Annotated[int, typer.Argument(min=1, max=MAX_VERSION, help="Version.")],
    *,
    clear_rejected: Annotated[
        bool,
        typer.Option("--clear-rejected", help="Have all members accept a rejected version again."),
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
    """Make a version live on every member, or on none; a terminal shows how far it is."""
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
    """Go back to the version of the commit before, and reject what is left, everywhere."""
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
    """End the apply or rollback that runs; what was decided before this stays decided."""
    with connect(address, model) as client:
        report = client.fleet_abort(reason)
    if json:
        render.show_json(report)
    elif report is None:
        echo("no apply of the fleet runs, so that none was ended; see `fleet status`")
    else:
        _show_report(report)


def _choices(order: str, max_unavailable: int, timeout: float | None) -> FleetChoices:
    choices = FleetChoices(order=order)
    if max_unavailable:
        choices["max_unavailable"] = max_unavailable
    if timeout is not None:
        choices["timeout_s"] = timeout
    return choices


def _show_report(report: types.FleetReport) -> None:
    done = sum(one.done for one in report.members)
    why = f" ({report.reason})" if report.reason else ""
    asked = f", a rollback because: {report.rollback_reason}" if report.rollback_reason else ""
    echo(
        f"apply {report.apply}, {report.order}: {report.decision or 'not decided'}{why}, version "
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


def _show_members(found: types.FleetStatus) -> None:
    for one in found.members:
        what = f"version {one.live_version} {one.content_digest}" if one.live_version else "nothing"
        number = f" {one.release}" if one.release else ""
        release = f", of an older release{number}: update it" if one.older else ""
        state = f"{one.state} ({one.reason})" if one.reason else one.state
        echo(f"{one.name}: {state}, {what}, {one.address or 'no address'}{release}")
