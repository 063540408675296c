"""Commands about the trainer that a server supervises: train, its status and end, checkpoint."""

from __future__ import annotations

import contextlib
import json as json_text
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from weightsync_client import train_calls
from weightsync_client.cli import render
from weightsync_client.cli.cli_options import Address, Json, Model, connect, echo, explain_interrupt
from weightsync_client.errors import ClientError, invalid
from weightsync_client.options import DEFAULT_ADDRESS

_CANCELLED = "the job is cancelled: what it committed stays, and what it did not commit is undone"

train = typer.Typer(
    name="train",
    help="Gives a job to the trainer that the server supervises, and prints its progress. An "
    "interrupt cancels the job.",
    invoke_without_command=True,
    rich_markup_mode=None,
)


@train.callback()
def run(
    context: typer.Context,
    *,
    request: Annotated[
        str | None,
        typer.Option(help="Request for the trainer's class, a JSON object; -: read it from stdin."),
    ] = None,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Give the trainer a job, and print its progress; --json prints one line per event."""
    if context.invoked_subcommand is not None:
        if request is not None:
            raise invalid(
                f"--request begins a job, and `train {context.invoked_subcommand}` takes none; "
                "leave one of them out",
            )
        return
    asked = _request(request)
    with (
        explain_interrupt(_CANCELLED),
        _showing_traceback(),
        connect(address, model) as client,
        contextlib.closing(client.train(asked)) as job,
    ):
        for progress in job:
            render.show_json(progress, lines=True) if json else _show_progress(progress)


@train.command()
def status(*, address: Address = DEFAULT_ADDRESS, model: Model = None, json: Json = False) -> None:
    """Show what the trainer is doing, and which jobs wait."""
    with connect(address, model) as client:
        found = client.train_status()
    render.show_json(found) if json else _show_status(found)


@train.command()
def cancel(
    job_id: Annotated[str, typer.Argument(help="Id from `weightsync train status`.")],
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
) -> None:
    """End a job that waits or runs. What it has committed stays, the rest is undone."""
    with connect(address, model) as client:
        client.cancel_train(job_id)
    echo(f"job {job_id} is cancelled")


def checkpoint(
    folder: Annotated[
        str | None,
        typer.Argument(
            help="Name of a new folder below the server's --checkpoint-dir; omitted: no folder."
        ),
    ] = None,
    *,
    address: Address = DEFAULT_ADDRESS,
    model: Model = None,
    json: Json = False,
) -> None:
    """Make the live version durable, with the trainer's state, and optionally a folder for vLLM."""
    if folder == "":
        raise invalid(
            "the name of the folder is empty; give one, or leave it out for no folder",
        )
    with connect(address, model) as client:
        result = client.checkpoint(folder or "")
    if json:
        render.show_json(result)
        return
    where = f"; on the server's host it is in {result.path}" if result.path else ""
    echo(f"version {result.version} is durable{where}")
    if result.missing:
        echo(result.missing, err=True)


@contextlib.contextmanager
def _showing_traceback() -> Iterator[None]:
    try:
        yield
    except ClientError as error:
        if traceback := error.metadata.get("traceback"):
            echo(traceback.rstrip(), err=True, lines=True)
        raise


def _request(text: str | None) -> dict[str, Any]:
    if text is None:
        raise invalid(
            "a job needs a request: give --request with a JSON object, {} where the trainer needs "
            "none, or --request - to read one from stdin",
        )
    text = sys.stdin.read() if text == "-" else text
    if not text.strip():
        raise invalid(
            "the request is empty; give a JSON object, {} where the trainer needs none",
        )
    try:
        found = json_text.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(f"--request is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise invalid("--request must be a JSON object, such as {}")
    return found


def _show_progress(one: train_calls.TrainProgress) -> None:
    match one.event:
        case train_calls.TrainEvent.QUEUED:
            line = f"job {one.job_id} waits, {one.ahead} before it"
        case train_calls.TrainEvent.STARTED:
            state = _state(one.state_version)
            line = f"job {one.job_id} runs, on version {one.version}; optimizer: {state}"
        case train_calls.TrainEvent.STEP:
            line = f"step {one.step}{_facts(one)}"
        case train_calls.TrainEvent.FINISHED:
            line = (
                f"job {one.job_id} has ended: {one.step} steps in {one.duration_s:.1f} s, "
                f"version {one.version} is live"
            )
        case _:
            return
    echo(line)


def _facts(one: train_calls.TrainProgress) -> str:
    loss = "" if one.loss is None else f", loss {one.loss:.6g}"
    tokens = "" if one.tokens is None else f", {one.tokens} tokens"
    return loss + tokens + (f", version {one.version} is live" if one.version else "")


def _show_status(found: train_calls.TrainStatus) -> None:
    reason = found.reason
    process = f", process {found.pid}" if found.pid else ""
    again = f", started again {found.restarts} times" if found.restarts else ""
    if found.state in (train_calls.TrainerState.READY, train_calls.TrainerState.TRAINING):
        # It is over.
        reason, again = "", again + (f", last because {reason}" if reason else "")
    standing = f"{found.state} ({reason})" if reason else found.state
    echo(f"trainer {standing}{process}{again}")
    echo(f"  optimizer: {_state(found.state_version)}")
    if found.running_job_id:
        echo(f"  job {found.running_job_id} runs, {found.running_steps} steps done")
    for job_id in found.queued_job_ids:
        echo(f"  job {job_id} waits")
    echo(
        f"  since the server started: {found.finished} ended well, {found.failed} failed, "
        f"{found.cancelled} cancelled"
    )


def _state(version: int) -> str:
    return f"as of version {version}" if version else "started over"
