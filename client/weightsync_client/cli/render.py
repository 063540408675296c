"""What commands print: JSON for programs, short lines for people, a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Iterator
from typing import Any

import typer

from weightsync_client import types
from weightsync_client.push_reasons import Way

__all__ = [
    "progress",
    "show_apply",
    "show_json",
    "show_push",
    "show_status",
    "show_verification",
    "show_version",
    "show_versions",
    "size",
]

#: Characters of a version's metadata on a line.
_METADATA = 80


def size(count: float) -> str:
    """Return bytes as people read them, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def _plain(value: object) -> object:
    if isinstance(value, dt.datetime):
        return value.isoformat()
    return str(value)


def show_json(result: Any, *, lines: bool = False) -> None:
    """Print a result as one JSON document; with `lines`, on one line."""
    if isinstance(result, list):
        document: Any = [dataclasses.asdict(item) for item in result]
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        document = dataclasses.asdict(result)
    else:
        document = result
    typer.echo(json.dumps(document, indent=None if lines else 2, default=_plain))


def show_push(result: types.PushResult) -> None:
    """Print what a push did."""
    what = "was already committed" if result.already else "committed"
    lasts = "" if result.durable else "; it lasts as long as the server, whose store is memory"
    speed = size(result.sent_bytes / max(result.seconds, 1e-9))
    typer.echo(
        f"version {result.version} {what}: {result.tensor_count} tensors, "
        f"{size(result.size_bytes)}, in {result.seconds:.2f} s ({speed}/s){lasts}"
    )
    if result.kind is types.PushKind.DELTA:
        typer.echo(
            f"delta of version {result.base_version}: {result.changed_fraction or 0:.2%} changed, "
            f"{size(result.sent_bytes)} sent in place of {size(result.dense_bytes)}"
        )
    elif result.fallback_reason:
        typer.echo(f"sent in full: {result.fallback_reason}")
    if result.way is Way.SAME_HOST:
        typer.echo("written into the server's memory on this host")
    typer.echo(f"content {result.content_digest}")


def _writers(push: types.PushStatus) -> str:
    """Return for whom a push of several writers waits."""
    text = f", {push.writers} writers" if push.writers else ""
    for what, writers in (
        ("not begun", push.absent_writers),
        ("unfinished", push.unfinished_writers),
    ):
        if writers:
            text += f", {what}: {', '.join(map(str, writers))}"
    return text


def _ranks(ranks: tuple[types.RankResult, ...]) -> None:
    for rank in ranks:
        state = f"version {rank.version}" if rank.version else "no whole version"
        note = f": {rank.error}" if rank.error else ""
        if rank.device_used_bytes:
            used, room = size(rank.device_used_bytes), size(rank.device_room_bytes)
            note = f", {used} of its device taken, room for {room}{note}"
        typer.echo(f"  rank {rank.rank}: {state} {rank.content_digest}{note}")
        if rank.loader is not None:
            _loader(rank, rank.loader)


def _loader(rank: types.RankResult, loader: types.LoaderStatus) -> None:
    what = f" version {loader.version}" if loader.version else ""
    done = f", {loader.percent} %" if loader.state is types.LoaderState.LOADING else ""
    typer.echo(
        f"    versions are loaded beside generation ({rank.transform_reason or 'as before'})\n"
        f"    loader {loader.state.value}{what}{done}, {size(loader.arena_bytes)} of memory, "
        f"last load {loader.load_s:.1f} s, started again {loader.restarts} times"
        + (f"\n    last failure: {loader.last_error}" if loader.last_error else "")
    )


def show_apply(report: types.ApplyReport) -> None:
    """Print what an apply did, or would do."""
    if report.plan is not None:
        plan = report.plan
        store = ", after reading it from the store" if plan.read_from_store else ""
        back = "" if plan.rollback_resident else "; a rollback would have to read or load it first"
        pause = f"about {plan.predicted_pause_s * 1e3:.1f} ms" if plan.predicted_pause_s else ""
        typer.echo(
            f"version {report.version} would be applied by {plan.strategy.value}: "
            f"{size(plan.write_bytes)} written, {size(plan.memory_bytes)} of memory more, "
            f"pause {pause or 'not known yet'}{store}{back}"
        )
        return
    phases = report.phases
    if report.outcome == types.ApplyOutcome.ALREADY_LIVE:
        typer.echo(f"version {report.version} was live already; nothing was done")
        return
    typer.echo(
        f"version {report.version} is live (before: {report.previous_version or 'none'}); "
        f"paused {phases.paused_total_s * 1e3:.1f} ms: commit {phases.commit_s * 1e3:.1f}, "
        f"verify {phases.verify_s * 1e3:.1f}; prepared in {phases.prepare_s:.2f} s"
    )
    _ranks(report.ranks)


def show_verification(result: types.Verification) -> None:
    """Print a proof."""
    verdict = "holds" if result.verified else "does NOT hold"
    typer.echo(f"every rank {verdict} version {result.version} {result.content_digest}")
    _ranks(result.ranks)


def _state(version: types.Version) -> str:
    words = [version.durability.value, version.residency.value]
    if version.serving in (types.Serving.LIVE, types.Serving.REJECTED):
        words.append(version.serving.value)
    if version.pinned:
        words.append("pinned")
    if version.layout_check is types.LayoutCheck.UNCHECKED:
        words.append("unchecked")
    return " ".join(words)


def _metadata(version: types.Version) -> str:
    text = " ".join(f"{key}={value}" for key, value in sorted(version.metadata.items()))
    # A trainer may have put anything there, and a terminal obeys some of it.
    shown = "".join(char if char.isprintable() else "?" for char in text)
    return shown if len(shown) <= _METADATA else shown[: _METADATA - 3] + "..."


def _line(version: types.Version) -> str:
    when = version.commit_time.strftime("%Y-%m-%d %H:%M:%S") if version.commit_time else "-"
    reason = f"  ({version.rejected_reason})" if version.rejected_reason else ""
    facts = _metadata(version)
    return (
        f"{version.version:>8}  {when:<19}  {size(version.size_bytes):>9}  "
        f"{version.content_digest or '-':<32}  {_state(version)}{reason}"
        + (f"  {facts}" if facts else "")
    )


def show_versions(versions: list[types.Version]) -> None:
    """Print a table of versions."""
    typer.echo(
        f"{'version':>8}  {'committed (UTC)':<19}  {'size':>9}  {'content':<32}  state, metadata"
    )
    for version in versions:
        typer.echo(_line(version))


def show_version(version: types.Version, note: str = "") -> None:
    """Print one version on a line."""
    typer.echo(_line(version) + (f"  {note}" if note else ""))


def show_status(status: types.Status) -> None:
    """Print the state of a server."""
    durable = "" if status.durable else " (not durable)"
    typer.echo(
        f"weightsync-server {status.server_version}, store {status.store}{durable}, "
        f"memory {size(status.memory_reserved_bytes)} of {size(status.memory_limit_bytes)}, "
        f"{status.fetchers} fetchers"
        + (f", {status.ingest_processes} ingest processes" if status.ingest_processes else "")
    )
    for name, count in sorted(status.invariant_violations.items()):
        if count:
            typer.echo(f"  INVARIANT {name} violated {count} times")
    for model in status.models:
        engine = model.engine
        back = str(model.rollback_version or "none")
        if model.rollback_version and not model.rollback_resident:
            back += " (from the store)"
        reason = f" ({engine.reason})" if engine.reason else ""
        typer.echo(
            f"model {model.model}: live {model.live_version or 'none'}, newest "
            f"{model.newest_version or 'none'}, rollback to {back}"
        )
        vllm = f" vLLM {engine.vllm_version}" if engine.vllm_version else ""
        typer.echo(f"  engine {engine.state}{reason} {engine.kind}{vllm}")
        for warning in engine.warnings:
            typer.echo(f"  WARNING {warning}")
        _ranks(engine.ranks)
        if model.apply_id:
            typer.echo(f"  apply {model.apply_id} in progress")
        for slot in model.slots:
            typer.echo(
                f"  slot {slot.slot}: {slot.state}, version {slot.version or 'none'}, "
                f"{size(slot.used_bytes)} of {size(slot.reserved_bytes)}, {slot.leases} readers"
            )
        for push in model.pushes:
            typer.echo(
                f"  push {push.push_id}: version {push.version}, {size(push.received_bytes)} of "
                f"{size(push.declared_bytes)}, {push.streams} streams"
                + (", unchecked" if push.layout_check is types.LayoutCheck.UNCHECKED else "")
                + _writers(push)
            )


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Show bytes, speed and time left on stderr if that is a terminal; gives the callback."""
    # Only here: it costs a tenth of a second that no other command needs.
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)

        def update(done: int, total: int) -> None:
            # Bytes sent again after a cut do not count twice.
            bar.update(task, completed=min(done, total or done), total=total or None)

        yield update
