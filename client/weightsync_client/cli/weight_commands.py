"""Commands that change something: push, apply, rollback, epoch, abort."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from weightsync.model.manifest import MAX_VERSION
from weightsync_client.cli import render
from weightsync_client.cli.cli_options import (
    Address,
    After,
    Cache,
    EngineName,
    Json,
    Key,
    MaxUnavailable,
    Model,
    Order,
    Pause,
    Wait,
    connect,
    echo,
    explain_interrupt,
    set_pause,
)
from weightsync_client.errors import invalid
from weightsync_client.gate import Gate, GateAction, GateWhen
from weightsync_client.options import (
    DEFAULT_ADDRESS,
    ApplyOptions,
    EngineChoices,
    PushOptions,
    RollbackOptions,
)
from weightsync_client.probes import Probes
from weightsync_client.push.session import NOTHING_SENT

_GOES_ON = "the server continues: `weightsync status` shows what is live"


def _metadata(pairs: list[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not key or not equals:
            raise invalid(f"--metadata {pair!r} is not KEY=VALUE")
        found[key] = value
    return found


def _set_engines(
    choices: EngineChoices, engine: str, order: str | None, max_unavailable: int
) -> None:
    if engine:
        choices["engine"] = engine
    if order is not None:
        choices["order"] = order
    if max_unavailable:
        choices["max_unavailable"] = max_unavailable


def push(
    path: Annotated[Path, typer.Argument(help="A .safetensors file or a folder of them.")],
    *,
    version: Annotated[
        int, typer.Option(min=0, max=MAX_VERSION, help="Version number; 0: the next.")
    ] = 0,
    epoch: Annotated[
        int,
        typer.Option(min=0, max=MAX_VERSION, help="Epoch, from `weightsync epoch`; 0: the newest."),
    ] = 0,
    metadata: Annotated[
        list[str] | None,
        typer.Option(
            help="KEY=VALUE kept with the version; repeatable. With run_id=NAME the pushes of a "
            "shell loop count as one run when two loops push in turn."
        ),
    ] = None,
    streams: Annotated[int, typer.Option(min=1, help="Concurrent streams.")] = 1,
    base: Annotated[
        Path | None,
        typer.Option(
            help="Send only what changed since this checkpoint, a file or folder whose content "
            "the server holds as a version; in full if that is not smaller."
        ),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option("--partial", help="Take the tensors that PATH lacks from --keep."),
    ] = False,
    keep: Annotated[
        int,
        typer.Option(
            min=0,
            max=MAX_VERSION,
            help="With --partial: the version to take them from; 0: the live one.",
        ),
    ] = 0,
    dtype: Annotated[
        str,
        typer.Option(
            help="auto: cast floats to the engine's dtypes; exact: refuse a push that needs a "
            "cast; keep: send tensors unchanged."
        ),
    ] = "auto",
    check_finite: Annotated[
        bool, typer.Option("--check-finite", help="Refuse tensors with NaN or infinity.")
    ] = False,
    probes: Annotated[
        Path | None,
        typer.Option(
            help="File that Probes.save has written: sequences that the gate of an apply scores."
        ),
    ] = None,
    key: Key = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Push a version. On success it is committed and verified; on failure it does not exist."""
    options = PushOptions(
        version=version,
        epoch=epoch,
        metadata=_metadata(metadata or []),
        streams=streams,
        dtype=dtype,
        check_finite=check_finite,
    )
    options["delta"] = "never" if base is None else "auto"
    if base is not None and partial:
        raise invalid(
            "--base compares a whole checkpoint and --partial pushes a part of one; use one",
        )
    if keep and not partial:
        raise invalid(
            f"--keep {keep} is given, but --partial is not: a push of all tensors keeps none",
        )
    if partial:
        options |= PushOptions(partial=True, base=keep)
    if probes is not None:
        options["probes"] = Probes.load(probes)
    if key:
        options["idempotency_key"] = key
    with (
        connect(address, model) as client,
        render.progress("push") as update,
        explain_interrupt(NOTHING_SENT),
    ):
        options["on_progress"] = update
        if base is not None:
            client.hold(base)
        result = client.push(path, **options)
    render.show_json(result) if json else render.show_push(result)


def apply(
    version: Annotated[
        int,
        typer.Argument(
            min=0, max=MAX_VERSION, help="Version number; 0: the newest that is not rejected."
        ),
    ] = 0,
    *,
    pause: Pause = "keep",
    cache: Cache = None,
    wait_timeout: Wait = None,
    after_wait: After = "keep",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check and plan, change nothing.")
    ] = False,
    allow_not_durable: Annotated[
        bool, typer.Option("--allow-not-durable", help="Apply it even before it is durable.")
    ] = False,
    clear_rejected: Annotated[
        bool, typer.Option("--clear-rejected", help="Accept a rejected or held version again.")
    ] = False,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept",
            help="Accept what a gate refused: --clear-rejected, and --on-fail report unless given.",
        ),
    ] = False,
    gate: Annotated[
        str | None,
        typer.Option(
            help="Score the version's probes: auto, off, before (in the pause) or after it.",
            show_default="auto",
        ),
    ] = None,
    on_fail: Annotated[
        str | None,
        typer.Option(
            help="A version over a limit: roll_back (and reject it), hold (go back, keep it) or "
            "report.",
            show_default="roll_back",
        ),
    ] = None,
    k3_limit: Annotated[
        float | None,
        typer.Option(help="Largest k3 to the trainer.", show_default="8 times that of versions"),
    ] = None,
    step_k3_limit: Annotated[
        float | None,
        typer.Option(help="Largest k3 to the version before.", show_default="none"),
    ] = None,
    gate_time: Annotated[
        float | None, typer.Option(help="Longest scoring, in seconds.", show_default="5")
    ] = None,
    gate_all: Annotated[
        bool, typer.Option("--gate-all", help="Every engine scores, not the first alone.")
    ] = False,
    prepare_timeout: Annotated[
        float | None, typer.Option(help="Longest prepare, in seconds.")
    ] = None,
    timeout: Annotated[float | None, typer.Option(help="Longest wait, in seconds.")] = None,
    engine: EngineName = "",
    order: Order = None,
    max_unavailable: MaxUnavailable = 0,
    key: Key = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Make a version live. Every rank proves it, or nothing changes."""
    options = ApplyOptions(
        dry_run=dry_run,
        require_durable=not allow_not_durable,
        clear_rejected=clear_rejected or accept,
    )
    chosen = Gate(
        gate or GateWhen.AUTO,
        on_fail or (GateAction.REPORT if accept else GateAction.ROLL_BACK),
        k3_limit,
        step_k3_limit,
        gate_time,
        gate_all,
    )
    if chosen != Gate():
        # An older server refuses any.
        options["gate"] = chosen
    set_pause(options, pause, cache, wait_timeout, after_wait, key)
    _set_engines(options, engine, order, max_unavailable)
    if prepare_timeout is not None:
        options["prepare_timeout_s"] = prepare_timeout
    if timeout is not None:
        options["timeout_s"] = timeout
    with connect(address, model) as client, explain_interrupt(_GOES_ON):
        report = client.apply(version, **options)
    render.show_json(report) if json else render.show_apply(report)


def rollback(
    *,
    reason: Annotated[str, typer.Option(help="Why, for logs and status.")] = "",
    pause: Pause = "keep",
    cache: Cache = None,
    wait_timeout: Wait = None,
    after_wait: After = "keep",
    engine: EngineName = "",
    order: Order = None,
    max_unavailable: MaxUnavailable = 0,
    key: Key = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Go back to the previous version, and mark the current one as rejected."""
    choices = RollbackOptions()
    set_pause(choices, pause, cache, wait_timeout, after_wait, key)
    _set_engines(choices, engine, order, max_unavailable)
    with connect(address, model) as client, explain_interrupt(_GOES_ON):
        result = client.rollback(reason, **choices)
    if json:
        render.show_json(result)
        return
    render.show_apply(result.report)
    if result.rejected_version:
        echo(f"version {result.rejected_version} is now rejected")
    else:
        echo("the version rolled back from could not be marked rejected", err=True)


def epoch(
    *,
    holder: Annotated[
        str, typer.Option(help="Name of the caller; default: host and process.")
    ] = "",
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Become the writer: pushes under older epochs are refused from then on.

    Give the number to each push (`weightsync push DIR --epoch N`), as each command is its own run.
    After the first commit under it, pushes of other runs without an epoch are refused, too.
    """
    with connect(address, model) as client:
        number = client.acquire_epoch(holder)
    render.show_json({"epoch": number}) if json else echo(str(number))


def abort(
    push_id: Annotated[str, typer.Argument(help="Id from `weightsync status`.")],
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
) -> None:
    """Drop an open push and free its slot."""
    with connect(address, model) as client:
        client.abort(push_id)
    echo(f"push {push_id} dropped")
