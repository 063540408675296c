"""Options that several commands share, and the client they make."""

from __future__ import annotations

from typing import Annotated

import typer

from weightsync.model.manifest import MAX_VERSION
from weightsync_client.client import Client
from weightsync_client.options import DEFAULT_ADDRESS, PauseChoices

__all__ = [
    "Address",
    "After",
    "Cache",
    "EngineName",
    "Json",
    "Key",
    "MaxUnavailable",
    "Model",
    "Order",
    "Pause",
    "Version",
    "Wait",
    "connect",
    "set_pause",
]

Address = Annotated[
    str,
    typer.Option(
        "--address",
        envvar="WEIGHTSYNC_ADDRESS",
        help="Server, HOST:PORT or unix:PATH.",
        show_default=DEFAULT_ADDRESS,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        envvar="WEIGHTSYNC_NAME",
        help="Model name; not needed if the server has one model.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout.")]
Key = Annotated[
    str | None,
    typer.Option("--key", help="Idempotency key: a repeated call with it joins the first."),
]
Pause = Annotated[
    str | None,
    typer.Option(
        "--pause",
        help="Requests in flight: keep, wait (finish first), abort; or between_steps: no pause.",
        show_default="keep",
    ),
]
Cache = Annotated[
    str | None,
    typer.Option(
        "--cache",
        help="Caches: recompute (exact; default) or keep (shortest gap; all that --pause "
        "between_steps can do).",
    ),
]
Wait = Annotated[
    float | None, typer.Option("--wait-timeout", help="With --pause wait: seconds to wait.")
]
Version = Annotated[int, typer.Argument(min=0, max=MAX_VERSION, help="Version.")]
EngineName = Annotated[
    str,
    typer.Option(
        "--engine", help="Only this engine, as `weightsync status` names it.", show_default="all"
    ),
]
Order = Annotated[
    str | None,
    typer.Option(
        "--order",
        help="Several engines: together (all in one pause) or rolling (in turn, while the others "
        "generate).",
        show_default="together",
    ),
]
MaxUnavailable = Annotated[
    int,
    typer.Option(
        "--max-unavailable",
        min=0,
        help="With --order rolling: engines away at once.",
        show_default="1",
    ),
]
After = Annotated[str, typer.Option("--after-wait", help="With --pause wait: then keep or abort.")]


def connect(address: str, model: str | None) -> Client:
    """Return a client; closed by `with`. Token and TLS come from the environment alone.

    Arguments are seen by every user of a host.
    """
    return Client(address or DEFAULT_ADDRESS, model=model or None)


def set_pause(
    choices: PauseChoices,
    pause: str | None,
    cache: str | None,
    wait_timeout: float | None,
    after_wait: str,
    key: str | None,
) -> None:
    """Put into the options of a call what was chosen of how to pause, and its key."""
    if pause is not None:
        choices["pause"] = pause
    if cache is not None:
        choices["cache"] = cache
    if wait_timeout is not None:
        choices["wait_timeout_s"] = wait_timeout
    if pause == "wait":
        choices["after_wait"] = after_wait
    if key:
        choices["idempotency_key"] = key
