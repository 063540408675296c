"""Trainers that write an engine's parameters in place, in processes that are forked.

What they import takes a process seconds; these have it from the server that they are forked from.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from multiprocessing import forkserver, resource_tracker
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.connection import Connection
    from multiprocessing.context import ForkServerProcess
    from pathlib import Path

    from weightsync_client.attach import Attached
    from weightsync_client.attach.joint_update import WrittenBox

__all__ = [
    "CONTEXT",
    "RANKS",
    "busy_trainer",
    "end_fork_server",
    "joint_update",
    "older_trainer",
    "stopped_trainer",
    "stray_trainer",
]

#: Processes of a joint update.
RANKS = 2
#: Of processes that are forked from a server that has imported all this.
CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload([__name__, "tests.support.late_writers"])
_END_S = 90.0


def end_fork_server() -> None:
    """End the server that trainers are forked from, and what goes with it."""
    forkserver._forkserver._stop()  # type: ignore[attr-defined]
    resource_tracker._resource_tracker._stop()  # type: ignore[attr-defined]


def joint_update(
    address: str, folder: Path, content: dict[str, torch.Tensor], how: str
) -> list[str]:
    """Return what two processes tell that have parts of tensors served.

    Args:
        address: Of the server, for trainers.
        folder: Empty; where they find each other.
        content: What they have together.
        how: "shards": each has half of each tensor; "replica": both have all of b; "background":
            twice in the background. Or what goes wrong in the second process: "missing": it has no
            b; "fails": an error when it has written; "changes": its tensors while it writes;
            "dies": it ends when it has written.
    """
    with contextlib.ExitStack() as stack:
        meeting = (folder / "ranks").as_uri()
        forked = [
            stack.enter_context(_forked(_rank, address, meeting, rank, content, how))
            for rank in range(RANKS)
        ]
        told = [_told(end) for _, end in forked]
        for process, _ in forked:
            process.join(_END_S)
            assert process.exitcode is not None, "a process does not end"
        return told


@contextlib.contextmanager
def stopped_trainer(address: str, lease_s: float, phase: str) -> Iterator[ForkServerProcess]:
    """Run a trainer that has written, and stands still for ever.

    Args:
        address: Of the server, for trainers.
        lease_s: Of its transaction.
        phase: Where: while it is `open`, or before the push of what is `live`.
    """
    with _forked(_stop, address, lease_s, phase) as (process, end):
        assert _told(end) == "written"
        yield process


@contextlib.contextmanager
def older_trainer(address: str) -> Iterator[ForkServerProcess]:
    """Run a trainer of an older release, which has memory that it can always write."""
    with _forked(_have, address) as (process, end):
        assert _told(end) == "attached"
        yield process


@contextlib.contextmanager
def stray_trainer(address: str) -> Iterator[Callable[[str], str]]:
    """Run a trainer of an older release that does what it is told, and begins no transaction.

    What this yields tells it: `write` has it write -1 into the middle of its first tensor, on every
    rank, and answer `written`; `check` has it answer what `Attached.check` says, "" if nothing.
    """
    near, far = CONTEXT.Pipe(duplex=False)
    with _forked(_stray, address, near) as (_, end):
        assert _told(end) == "attached"

        def tell(order: str) -> str:
            far.send(order)
            return _told(end)

        yield tell


@contextlib.contextmanager
def busy_trainer(address: str) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Run a trainer that writes all the time in a block, until its transaction has ended.

    Its pipe tells `written` when it has begun, and then the reason with which that ended.
    """
    with _forked(_write_on, address) as (process, end):
        assert _told(end) == "written"
        yield process, end


@contextlib.contextmanager
def _forked(
    work: Callable[..., None], *arguments: Any
) -> Iterator[tuple[ForkServerProcess, Connection]]:
    """Run a process until the block ends, with the end of a pipe that it tells something by."""
    near, far = CONTEXT.Pipe(duplex=False)
    process = CONTEXT.Process(target=work, args=(far, *arguments), daemon=True)
    process.start()
    far.close()
    try:
        yield process, near
    finally:
        process.kill()
        process.join()
        near.close()


def _told(end: Connection) -> str:
    """Return what a process tells, or nothing where it has ended before."""
    assert end.poll(_END_S), "a process neither tells anything nor ends"
    with contextlib.suppress(EOFError):
        return str(end.recv())
    return ""


def _rank(
    end: Connection,
    address: str,
    meeting: str,
    rank: int,
    content: dict[str, torch.Tensor],
    how: str,
) -> None:
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    tensors: dict[str, Any] = {
        name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in content.items()
    }
    if how == "replica":
        tensors["b"] = distribute_tensor(content["b"], mesh, [Replicate()])
    if how == "missing" and rank:
        del tensors["b"]
    with Client(address) as client, client.attach() as attached, contextlib.ExitStack() as stack:
        if rank:
            stack.enter_context(_wrong(attached, how))
        try:
            for _ in range(2 if how == "background" else 1):
                done = attached.update(tensors, background=how == "background")
            report = done.result()
        except (ClientError, ZeroDivisionError, RuntimeError) as error:
            end.send(f"{type(error).__name__} {error}")
        else:
            assert report is not None
            end.send(f"version {report.version} {attached.version}")


@contextlib.contextmanager
def _wrong(attached: Attached, how: str) -> Iterator[None]:
    """Let something go wrong in this process."""
    check = attached.check_written

    def change(places: Sequence[WrittenBox]) -> None:
        if how == "dies":
            os._exit(3)
        places[0].source.add_(1)
        check(places)

    with pytest.MonkeyPatch.context() as patch:
        if how == "fails":
            patch.setattr(attached, "settle", lambda: 1 / 0)
        if how in {"changes", "dies"}:
            patch.setattr(attached, "check_written", change)
        yield


def _write_on(end: Connection, address: str) -> None:
    with Client(address) as client, client.attach() as attached:
        try:
            with attached.transaction() as transaction:
                for number in range(10**9):
                    for boxes in attached.boxes.values():
                        for box in boxes:
                            box.view.fill_(-1 - number)
                    if not number:
                        end.send("written")
                    # A while after the server has ended it, which this need not look at.
                    if number % 1000 == 999:
                        transaction.renew()
        except ClientError as error:
            end.send(str(error.reason.value))


def _have(end: Connection, address: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightsync_client.attach.trainer_job", str)
        with Client(address) as client, client.attach():
            end.send("attached")
            time.sleep(600)


def _stray(end: Connection, address: str, orders: Connection) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("weightsync_client.attach.trainer_job", str)
        with Client(address) as client, client.attach() as attached:
            end.send("attached")
            while True:
                answer = "written" if orders.recv() == "write" else ""
                if answer:
                    for box in next(iter(attached.boxes.values())):
                        box.view.view(-1)[box.view.numel() // 2] = -1
                else:
                    try:
                        attached.check()
                    except ClientError as error:
                        answer = error.message
                end.send(answer)


def _stop(end: Connection, address: str, lease_s: float, phase: str) -> None:
    def stop(*_: object, **__: object) -> None:
        end.send("written")
        time.sleep(600)

    with Client(address) as client, client.attach() as attached:
        if phase == "live":
            object.__setattr__(attached._writing, "push", stop)
        with attached.transaction(lease_s=lease_s):
            for box in attached.boxes["w"]:
                box.view.fill_(-1)
            if phase == "open":
                stop()
