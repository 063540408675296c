"""What commands print: JSON for programs, short lines for people, a progress bar on a terminal."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime as dt
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from weightsync_client import types
from weightsync_client.cli.cli_options import as_commands, echo
from weightsync_client.gate import GateOutcome, GateReport
from weightsync_client.push_reasons import TransferPath

#: What people call the phases of an apply.
PHASES = {
    types.RunningPhase.UNSPECIFIED: "in a phase that this client does not know",
    types.RunningPhase.PREPARE: "prepare",
    types.RunningPhase.PAUSE: "pause",
    types.RunningPhase.COMMIT: "commit and verify",
    types.RunningPhase.RESUME: "resume",
    types.RunningPhase.WAIT: "waiting for other engines or the fleet",
    types.RunningPhase.RESTORE: "going back to the version before",
    types.RunningPhase.SCORE: "scoring probes",
}
#: Characters of a version's metadata on a line.
_METADATA = 80


def size(count: float) -> str:
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
    if isinstance(result, list):
        document: Any = [dataclasses.asdict(item) for item in result]
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        document = dataclasses.asdict(result)
    else:
        document = result
    echo(json.dumps(document, indent=None if lines else 2, default=_plain), lines=True)


def show_push(result: types.PushResult) -> None:
    what = "was already committed" if result.already else "committed"
    lasts = "" if result.durable else "; it lasts as long as the server, whose store is memory"
    speed = size(result.sent_bytes / max(result.seconds, 1e-9))
    echo(
        f"version {result.version} {what}: {result.tensor_count} tensors, "
        f"{size(result.size_bytes)}, in {result.seconds:.2f} s ({speed}/s){lasts}"
    )
    if result.kind is types.PushKind.DELTA:
        echo(
            f"delta of version {result.base_version}: {result.changed_fraction or 0:.2%} changed, "
            f"{size(result.sent_bytes)} sent instead of {size(result.dense_bytes)}"
        )
    elif result.fallback_reason:
        echo(f"sent in full: {result.fallback_reason}")
    if result.cast:
        echo(f"cast to what the engine has: {result.cast} tensors")
    if result.way is TransferPath.SAME_HOST:
        echo("written into the server's memory on this host")
    echo(f"content {result.content_digest}")


def _writers(push: types.PushStatus) -> str:
    text = f", {push.writers} writers" if push.writers else ""
    for what, writers in (
        ("not begun", push.absent_writers),
        ("unfinished", push.unfinished_writers),
    ):
        if writers:
            text += f", {what}: {', '.join(map(str, writers))}"
    return text


def _ranks(ranks: tuple[types.RankResult, ...], indent: str = "  ") -> None:
    for rank in ranks:
        state = f"version {rank.version}" if rank.version else "no whole version"
        note = f": {rank.error}" if rank.error else ""
        if rank.device_used_bytes:
            used, room = size(rank.device_used_bytes), size(rank.device_room_bytes)
            note = f", {used} of its device taken, room for {room}{note}"
        echo(f"{indent}rank {rank.rank}: {state} {rank.content_digest}{note}")
        if rank.loader is not None:
            _loader(rank, rank.loader, f"{indent}  ")


def _loader(rank: types.RankResult, loader: types.LoaderStatus, indent: str) -> None:
    what = f" version {loader.version}" if loader.version else ""
    done = f", {loader.percent} %" if loader.state is types.LoaderState.LOADING else ""
    why = rank.transform_reason or "the reason is no longer known"
    echo(f"{indent}versions are loaded beside generation ({why})")
    echo(
        f"{indent}loader {loader.state.value}{what}{done}, {size(loader.arena_bytes)} of memory, "
        f"last load {loader.load_s:.1f} s, started again {loader.restarts} times"
    )
    if loader.last_error:
        echo(f"{indent}last failure: {loader.last_error}")


def show_apply(report: types.ApplyReport) -> None:
    _outcome(report)
    if report.gate is not None:
        echo(gate_line(report.gate))
    if len(report.engines) > 1:
        _engine_reports(report.engines)
    elif _changed(report):
        _ranks(report.ranks)


def _changed(report: types.ApplyReport) -> bool:
    return report.plan is None and report.outcome != types.ApplyOutcome.ALREADY_LIVE


def _engine_reports(engines: tuple[types.EngineReport, ...]) -> None:
    for one in engines:
        if one.report is None:
            echo(f"  engine {one.engine} took no part: {one.absent}")
            continue
        report = one.report
        paused = f", paused {report.phases.paused_total_s * 1e3:.1f} ms"
        outcome = report.outcome.value.replace("_", " ")
        echo(f"  engine {one.engine}: {outcome}{paused if _changed(report) else ''}")
        if report.gate is not None:
            echo(f"    {gate_line(report.gate)}")
        if _changed(report):
            _ranks(report.ranks, "    ")


def _outcome(report: types.ApplyReport) -> None:
    if report.plan is not None:
        plan = report.plan
        store = ", after reading it from the store" if plan.read_from_store else ""
        back = "" if plan.rollback_resident else "; a rollback would have to read or load it first"
        pause = f"about {plan.predicted_pause_s * 1e3:.1f} ms" if plan.predicted_pause_s else ""
        echo(
            f"version {report.version} would be applied by {plan.strategy.value}: "
            f"{size(plan.write_bytes)} written, {size(plan.memory_bytes)} of memory more, "
            f"pause {pause or 'not known yet'}{store}{back}"
        )
        return
    phases = report.phases
    if report.outcome == types.ApplyOutcome.ALREADY_LIVE:
        echo(f"version {report.version} was live already; nothing was done")
        return
    reports = [one.report for one in report.engines if one.report is not None]
    moved = (one.previous_version for one in reports if _changed(one))
    before = _each(report.previous_version, moved)
    echo(
        f"version {report.version} is live (before: {before}); "
        f"paused {phases.paused_total_s * 1e3:.1f} ms: commit {phases.commit_s * 1e3:.1f}, "
        f"verify {phases.verify_s * 1e3:.1f}; prepared in {phases.prepare_s:.2f} s"
    )


def gate_line(gate: GateReport) -> str:
    """Return what scoring has shown, as one line."""
    outcome = gate.outcome.replace("_", " ")
    reason = f": {as_commands(gate.reason)}" if gate.reason else ""
    line = f"gate {gate.when} {outcome}{reason}; {gate.probes} probes in {_ms(gate.took_s)}"
    if gate.tokens:
        floor = f", median {gate.floor_k3:.2g}" if gate.floor_k3 else ""
        line += (
            f"; k3 {gate.k3:.2g} (limit {gate.k3_limit:.2g}{floor}) over {gate.tokens} tokens, "
            f"|d| {gate.mean_abs:.2g}, at most {gate.max_abs:.2g}"
        )
    if gate.step_k3 is not None:
        limit = f" (limit {gate.step_k3_limit:.2g})" if gate.step_k3_limit else ""
        line += f"; step k3 {gate.step_k3:.2g}{limit}"
    if gate.nan:
        line += f"; {gate.nan} are no numbers"
    scored = gate.tokens or gate.nan or gate.step_k3 is not None
    bad = gate.outcome is not GateOutcome.PASSED and scored
    return f"{line}; worst probe {gate.worst_probe}" if bad else line


_GATES = (
    "engine", "version", "outcome", "k3", "limit", "median", "|d|", "max |d|", "step k3", "tokens",
    "NaN", "probes", "worst", "took", "why",
)  # fmt: skip


def show_gates(result: types.Verification) -> None:
    """Print one line for each engine."""
    if not result.engines:
        # Of an older server, which scores nothing.
        show_verification(result)
        return
    rows = [_gate_row(one) for one in result.engines]
    _table([_GATES, *rows])


def _gate_row(one: types.EngineProof) -> tuple[str, ...]:
    gate = one.gate
    holds = "" if one.verified or one.absent else f"a rank does NOT hold version {one.version}"
    if gate is None:
        why = one.absent or holds or "it has no probes; push with probes="
        return (one.engine, str(one.version or "-"), *["-"] * 12, as_commands(why))
    compared = gate.tokens > 0
    return (
        one.engine,
        str(gate.version),
        gate.outcome.replace("_", " "),
        f"{gate.k3:.2g}" if compared else "-",
        f"{gate.k3_limit:.2g}" if compared else "-",
        f"{gate.floor_k3:.2g}" if gate.floor_k3 else "-",
        f"{gate.mean_abs:.2g}" if compared else "-",
        f"{gate.max_abs:.2g}" if compared else "-",
        f"{gate.step_k3:.2g}" if gate.step_k3 is not None else "-",
        str(gate.tokens),
        str(gate.nan),
        str(gate.probes),
        str(gate.worst_probe),
        _ms(gate.took_s),
        as_commands("; ".join(filter(None, (holds, gate.reason)))),
    )


def _table(rows: list[tuple[str, ...]]) -> None:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        echo("  ".join(cells).rstrip())


def show_verification(result: types.Verification) -> None:
    if len(result.engines) > 1:
        for one in result.engines:
            if one.absent:
                echo(f"engine {one.engine} was not asked: {one.absent}")
                continue
            echo(f"engine {one.engine}: every rank {_verdict(one)} version {one.version}")
            _ranks(one.ranks)
        return
    echo(f"every rank {_verdict(result)} version {result.version} {result.content_digest}")
    _ranks(result.ranks)


def _verdict(proof: types.Verification | types.EngineProof) -> str:
    return "holds" if proof.verified else "does NOT hold"


def _state(version: types.Version) -> str:
    words = [version.durability.value, version.residency.value]
    if version.serving in (types.Serving.LIVE, types.Serving.REJECTED, types.Serving.HELD):
        words.append(version.serving.value)
    if version.probe_count:
        words.append(f"{version.probe_count} probes")
    if version.pinned:
        words.append("pinned")
    if version.layout_check is types.LayoutCheck.UNCHECKED:
        words.append("unchecked")
    return " ".join(words)


def _metadata(version: types.Version) -> str:
    text = " ".join(f"{key}={value}" for key, value in sorted(version.metadata.items()))
    # A trainer may have put anything there, of which an escape would take the room of the rest.
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
    echo(f"{'version':>8}  {'committed (UTC)':<19}  {'size':>9}  {'content':<32}  state, metadata")
    for version in versions:
        echo(_line(version))


def show_version(version: types.Version, note: str = "") -> None:
    echo(_line(version) + (f"  {note}" if note else ""))


_APPLIES = (
    "number", "began (UTC)", "what", "version", "result", "paused", "took", "written", "by",
    "gate", "slowest rank", "asked by", "why",
)  # fmt: skip


def show_applies(applies: list[types.ApplyRecord]) -> None:
    if not applies:
        echo("no apply is recorded")
        return
    _table([_APPLIES, *map(_apply_row, applies)])


def _apply_row(record: types.ApplyRecord) -> tuple[str, ...]:
    done = record.phases is not None
    slowest = record.slowest
    order = f" {record.order}" if record.order is not types.EngineOrder.UNSPECIFIED else ""
    fleet = f" no. {record.fleet_apply}" if record.fleet_apply else ""
    engine = f" on {record.engine}" if record.engine else ""
    return (
        str(record.number),
        f"{record.time:%Y-%m-%d %H:%M:%S}" if record.time else "-",
        f"{record.kind.replace('_', ' ')}{fleet}{order}{engine}",
        f"{record.previous_version or '?'} -> {record.version or '?'}",
        _result(record),
        f"{record.phases.paused_total_s * 1e3:.1f} ms" if record.phases else "-",
        f"{record.took_s:.2f} s",
        size(record.written_bytes) if done else "-",
        record.strategy.value if done else "-",
        _gate_cell(record.gate),
        f"{slowest.rank} of {slowest.engine}, {_slowest_ms(slowest)}" if slowest else "-",
        record.requested_by,
        as_commands(record.reason or record.cause),
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def _slowest_ms(rank: types.SlowestRank) -> str:
    return _ms(rank.commit_s + rank.verify_s)


def _gate_cell(gate: GateReport | None) -> str:
    if gate is None:
        return "-"
    compared = f", k3 {gate.k3:.2g}" if gate.tokens else ""
    return f"{gate.outcome.replace('_', ' ')}{compared}"


def _result(record: types.ApplyRecord) -> str:
    times = f" {record.times} times" if record.times > 1 else ""
    return f"{record.result.replace('_', ' ')}{times}"


def _age(seconds: float) -> str:
    for unit, most, parts in (("s", 100, 60), ("min", 100, 60), ("h", 48, 24)):
        if seconds < most:
            return f"{seconds:.0f} {unit}"
        seconds /= parts
    return f"{seconds:.0f} days"


def show_status(status: types.Status) -> None:
    durable = "" if status.durable else " (not durable)"
    echo(
        f"weightsync-server {status.server_version}, store {status.store}{durable}, "
        f"memory {size(status.memory_reserved_bytes)} of {size(status.memory_limit_bytes)}, "
        f"{status.fetchers} fetchers"
        + (f", {status.ingest_processes} ingest processes" if status.ingest_processes else "")
        + (f", up for {_age(status.uptime_s)}" if status.uptime_s else "")
    )
    for disk in status.disks:
        full = f"; FULL: {disk.error}" if disk.error else ""
        room = f"{size(disk.free_bytes)} free, {size(disk.used_bytes)} used"
        echo(f"  disk of {disk.folder} ({disk.path}): {room}{full}")
    for name, count in sorted(status.invariant_violations.items()):
        if count:
            echo(f"  INVARIANT {name} violated {count} times: report it with the server's log")
    for model in status.models:
        _versions(model)
        if len(model.engines) > 1:
            for one in model.engines:
                _engine(one, f" {one.name}: version {one.live_version or 'none'},", "    ")
        elif model.engine.state is types.EngineState.UNSPECIFIED:
            echo("  no engine")
        else:
            _engine(model.engine, "", "  ")
        _client_runs(model.client_runs)
        if model.apply_id:
            echo(f"  apply {model.apply_id} in progress{_running(model)}")
        for slot in model.slots:
            echo(
                f"  slot {slot.slot}: {slot.state}, version {slot.version or 'none'}, "
                f"{size(slot.used_bytes)} of {size(slot.reserved_bytes)}, {slot.leases} readers"
            )
        for push in model.pushes:
            echo(
                f"  push {push.push_id}: version {push.version}, {size(push.received_bytes)} of "
                f"{size(push.declared_bytes)}, {push.streams} streams"
                + (", unchecked" if push.layout_check is types.LayoutCheck.UNCHECKED else "")
                + _writers(push)
            )


def _running(model: types.ModelStatus) -> str:
    running = model.running_apply
    if running is None:
        return ""
    whose = f" of engine {running.engine}" if len(model.engines) > 1 else ""
    ranks = ", ".join(running.pending_ranks)
    return (
        (f": version {running.previous_version} -> {running.version}" if running.version else "")
        + f", {PHASES[running.phase]}{whose} for {running.in_phase_s:.1f} s"
        f" (begun {running.took_s:.1f} s ago)" + (f"; not done: rank {ranks}" if ranks else "")
    )


def _client_runs(runs: tuple[types.ClientRun, ...]) -> None:
    # Each `weightsync push` is a run of its own: those of one version say nothing of who pushes.
    shown = [run for at, run in enumerate(runs) if not at or run.versions > 1 or run.has_epoch]
    if len(shown) < 2:
        return
    for run in shown:
        holds = ", has the epoch" if run.has_epoch else ""
        echo(f"  run {run.client_run}: {run.versions} versions, newest {run.newest_version}{holds}")


def _versions(model: types.ModelStatus) -> None:
    live = _each(model.live_version, (one.live_version for one in model.engines))
    back = _each(model.rollback_version, (one.rollback_version for one in model.engines))
    if model.rollback_version and not model.rollback_resident:
        back += " (from the store)"
    newest = str(model.newest_version or "none")
    echo(
        f"model {model.model}: live {live}{_since(model.live_age_s)}, newest "
        f"{newest}{_since(model.newest_age_s)}, rollback to {back}"
    )
    if model.newest_not_live:
        echo(f"  version {newest} is not live: {as_commands(model.newest_not_live)}")
    if (last := model.last_apply) is not None:
        when = f" at {last.time:%Y-%m-%d %H:%M:%S} UTC" if last.time else ""
        paused = f", paused {last.phases.paused_total_s * 1e3:.1f} ms" if last.phases else ""
        why = as_commands(last.reason or last.cause)
        why = f" ({why})" if why else ""
        echo(
            f"  last {last.kind.replace('_', ' ')}{when} by {last.requested_by}: version "
            f"{last.previous_version or '?'} -> {last.version or '?'} {_result(last)}{paused}{why}"
        )


def _since(age_s: float | None) -> str:
    return f" (committed {_age(age_s)} ago)" if age_s is not None else ""


def _each(common: int, versions: Iterable[int]) -> str:
    """Return the version of all engines, or those that they differ in, or that there is none."""
    return str(common or " and ".join(map(str, sorted({*versions} - {0}))) or "none")


def _engine(engine: types.EngineStatus, name: str, indent: str) -> None:
    reason = f" ({engine.reason})" if engine.reason else ""
    vllm = f" vLLM {engine.vllm_version}" if engine.vllm_version else ""
    echo(f"  engine{name} {engine.state}{reason} {engine.kind}{vllm}")
    for warning in engine.warnings:
        echo(f"{indent}WARNING {warning}")
    if engine.gate is not None:
        echo(f"{indent}last {gate_line(engine.gate)}, of version {engine.gate.version}")
    _ranks(engine.ranks, indent)


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
