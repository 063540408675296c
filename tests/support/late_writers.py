"""Trainers that write an engine's parameters when they may not, in processes that are forked.

Each of `WAYS` has written in one block rightly, which is a version or was taken back, and then does
what its name says. Those of `SECOND` do so in the block of another job.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import signal
import threading
from typing import TYPE_CHECKING

import torch

from tests.support.in_place_trainers import CONTEXT
from weightsync_client import AbortedError, Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from multiprocessing.connection import Connection

    from weightsync_client.attach import Attached

__all__ = ["SECOND", "WAYS", "late_writer", "second_job"]

_END_S = 60.0


#: Whether the block counts.
_commits = True


class _TakenBackError(Exception):
    pass


@contextlib.contextmanager
def _written(attached: Attached) -> Iterator[None]:
    """A block in which all was written."""
    with contextlib.suppress(_TakenBackError), attached.transaction():
        for name in attached.boxes:
            attached.write(name, attached.read(name) + 1)
        yield
        if not _commits:
            raise _TakenBackError


def _block(attached: Attached) -> None:
    with _written(attached):
        pass


def _after_close(attached: Attached) -> None:
    view = next(iter(attached.boxes.values()))[0].view
    _block(attached)
    attached.close()
    view.fill_(-1)


def _read_after_close(attached: Attached) -> None:
    view = next(iter(attached.boxes.values()))[0].view
    _block(attached)
    attached.close()
    view.sum()


def _after_a_block(attached: Attached) -> None:
    view = next(iter(attached.boxes.values()))[0].view
    _block(attached)
    view.fill_(-1)


def _by_numpy(attached: Attached) -> None:
    array = next(iter(attached.boxes.values()))[0].view.view(torch.int8).numpy()
    _block(attached)
    array[:] = -1


def _by_a_thread(attached: Attached) -> None:
    """One that writes all the time from within the block."""
    view = next(iter(attached.boxes.values()))[0].view
    begun = threading.Event()

    def write() -> None:
        begun.wait()
        while True:
            view.zero_()

    threading.Thread(target=write, daemon=True).start()
    # What it writes in the block may be found: then the block is taken back, and it writes on.
    with contextlib.suppress(AbortedError), _written(attached):
        begun.set()
    threading.Event().wait(_END_S)


def _by_proc_mem(attached: Attached) -> None:
    view = next(iter(attached.boxes.values()))[0].view
    _block(attached)
    _write_past_protection(view)


def _write_past_protection(view: torch.Tensor) -> None:
    fd = os.open("/proc/self/mem", os.O_RDWR)
    try:
        os.pwrite(fd, b"\xff" * 8, view.data_ptr())
    except OSError:
        os.kill(os.getpid(), signal.SIGSEGV)


def _by_mprotect(attached: Attached) -> None:
    view = next(iter(attached.boxes.values()))[0].view
    _block(attached)
    page = view.data_ptr() & -mmap.PAGESIZE
    protect = ctypes.CDLL(None).mprotect
    protect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    protect(page, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_WRITE)
    view.fill_(-1)


def _by_a_child(attached: Attached) -> None:
    """A process that is forked in the block, and writes after it."""
    view = next(iter(attached.boxes.values()))[0].view
    read, write = os.pipe()
    with _written(attached):
        pid = os.fork()
        if not pid:
            os.read(read, 1)
            view.numpy()[:] = -1
            os._exit(0)
    os.write(write, b".")
    _, status = os.waitpid(pid, 0)
    os.kill(os.getpid(), os.WTERMSIG(status) or signal.SIGTERM)


#: What a trainer does; each is ended by SIGSEGV.
WAYS: dict[str, Callable[[Attached], None]] = {
    "after close": _after_close,
    "read after close": _read_after_close,
    "after a block": _after_a_block,
    "numpy": _by_numpy,
    "thread": _by_a_thread,
    "proc mem": _by_proc_mem,
    "mprotect": _by_mprotect,
    "child": _by_a_child,
}


def late_writer(address: str, way: str, *, commits: bool = True) -> int:
    """Return how a trainer ended that has done so, as `Process.exitcode` tells it.

    Args:
        address: Of the server, for trainers.
        way: Of `WAYS`.
        commits: Whether its block counts.
    """
    process = CONTEXT.Process(target=_run, args=(address, way, commits), daemon=True)
    process.start()
    process.join(_END_S)
    if process.exitcode is None:
        process.kill()
        process.join()
        return 0
    return int(process.exitcode)


def _run(address: str, way: str, commits: bool) -> None:
    global _commits  # noqa: PLW0603 - of this process
    _commits = commits
    torch.set_num_threads(1)
    client = Client(address)
    WAYS[way](client.attach())
    os._exit(0)


def _here(attached: Attached, _: str) -> None:
    next(iter(attached.boxes.values()))[0].view.fill_(-1)


def _past_protection(attached: Attached, _: str) -> None:
    _write_past_protection(next(iter(attached.boxes.values()))[0].view)


def _in_its_own(attached: Attached, _: str) -> None:
    with attached.transaction():
        _here(attached, _)


def _in_that_of_another(attached: Attached, transaction: str) -> None:
    """By its name, which GetStatus tells."""
    attached.open_block(transaction)
    _here(attached, transaction)


def _by_a_new_descriptor(attached: Attached, _: str) -> None:
    """As who means harm can, and keeps it."""
    for _mapping, fd in attached._client._memory:
        again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
        os.pwrite(again, b"\xff" * 8, 0)


#: What a second job does in the block of the first, with the name of its transaction.
SECOND: dict[str, Callable[[Attached, str], None]] = {
    "view": _here,
    "proc mem": _past_protection,
    "own transaction": _in_its_own,
    "other's transaction": _in_that_of_another,
    "descriptor": _by_a_new_descriptor,
}


@contextlib.contextmanager
def second_job(address: str) -> Iterator[Callable[[str, str], str]]:
    """Run a trainer that has attached, too, for the block.

    What this yields has it do one of `SECOND`, given a transaction, and returns what came of it: a
    sentence, the signal that it was ended by, or `written`.

    Args:
        address: Of the server, for trainers.
    """
    near, far = CONTEXT.Pipe()
    process = CONTEXT.Process(target=_attach_second, args=(far, address), daemon=True)
    process.start()
    far.close()

    def told() -> str:
        assert near.poll(_END_S), "a process neither tells anything nor ends"
        try:
            return str(near.recv())
        except EOFError:
            process.join()
            return signal.Signals(-(process.exitcode or 0)).name

    def attempt(way: str, transaction: str) -> str:
        near.send((way, transaction))
        return told()

    try:
        assert told() == "attached"
        yield attempt
    finally:
        process.kill()
        process.join()
        near.close()


def _attach_second(end: Connection, address: str) -> None:
    torch.set_num_threads(1)
    with Client(address) as client, client.attach() as attached:
        end.send("attached")
        while True:
            way, transaction = end.recv()
            try:
                SECOND[way](attached, transaction)
            except ClientError as error:
                end.send(error.message)
            else:
                end.send("written")
