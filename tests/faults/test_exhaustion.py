"""No room: on the disk, in memory, for names or descriptors. What is there stays, and room helps.

Disks are real tmpfs mounts in a mount namespace of the server's own; other limits are set on the
running processes.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import grpc
import pytest

from benchmarks.servers import descendants
from tests.support.bounds import (
    FIRST,
    MODEL,
    Message,
    begin,
    model_status,
    one_shard,
    push_messages,
    serving,
    within,
)
from tests.support.memory_bridge import memory_bridge
from tests.support.processes import descriptors
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync_client import Client, ExhaustedError
from weightsync_client.errors import ClientError, from_rpc

MIB = 1 << 20
Stub = weightsync_pb2_grpc.WeightSyncStub


def _may_mount() -> bool:
    if os.geteuid() or not shutil.which("unshare"):
        return False
    try_it = ["unshare", "--mount", "sh", "-c", "mount -t tmpfs tmpfs /mnt"]
    return subprocess.run(try_it, capture_output=True, check=False).returncode == 0


mounts = pytest.mark.skipif(not _may_mount(), reason="mounting a tmpfs needs root")


def exhausted(call: Callable[[], object]) -> ClientError:
    with pytest.raises(grpc.RpcError) as caught:
        call()
    error = from_rpc(caught.value, method="", address="")
    assert error.code is grpc.StatusCode.RESOURCE_EXHAUSTED, error
    return error


def push(stub: Stub, size: int, seed: int = 0, **fields: object) -> pb.CommitPushResponse:
    return stub.PushWeights(push_messages(one_shard(size, seed), **fields), timeout=20).commit


def pulled(stub: Stub, version: int = FIRST) -> bytes:
    request = pb.PullWeightsRequest(model=MODEL, version=version)
    return b"".join(m.chunk.data for m in stub.PullWeights(request, timeout=20))


class Disk:
    """A disk of the server's own, seen from outside."""

    def __init__(self, root: Path, path: Path) -> None:
        self.path = root / path.relative_to("/")
        self._root = root
        self._filler = self.path / "filler"

    def other(self, path: str) -> Disk:
        """Another mount of the same server."""
        return Disk(self._root, Path(path))

    def free(self) -> int:
        status = os.statvfs(self.path)
        return status.f_bavail * status.f_frsize

    def fill(self, leave: int = 0) -> None:
        fd = os.open(self._filler, os.O_CREAT | os.O_WRONLY)
        with contextlib.closing(os.fdopen(fd, "wb")):
            os.posix_fallocate(fd, 0, self.free() - leave)

    def empty(self) -> None:
        self._filler.unlink()

    def fill_names(self) -> None:
        """Take every inode."""
        (self.path / "names").mkdir()
        with contextlib.suppress(OSError):
            for number in range(10_000):
                (self.path / "names" / str(number)).touch()

    def empty_names(self) -> None:
        shutil.rmtree(self.path / "names")


@contextlib.contextmanager
def small_disk(options: str, *flags: str) -> Iterator[tuple[Stub, Disk]]:
    flags = ("--disk-floor-bytes", str(MIB), "--slots", "4", *flags)
    with serving(*flags, store="", disk=options) as server:
        assert server.process is not None
        yield server.stub, Disk(Path(f"/proc/{server.process.pid}/root"), server.state_dir)


@mounts
def test_a_push_that_does_not_fit_the_disk_is_refused_before_its_first_byte() -> None:
    with small_disk("size=16m") as (stub, disk):
        push(stub, 4 * MIB)
        held = pulled(stub)
        error = exhausted(lambda: stub.BeginPush(begin(total_bytes=12 * MIB), timeout=5))
        assert error.reason is Reason.DISK_EXHAUSTED
        assert error.metadata["needed_bytes"] == str(12 * MIB)
        assert error.metadata["floor_bytes"] == str(MIB)
        # Two open pushes are promised their bytes together.
        one = stub.BeginPush(begin(version=8, total_bytes=8 * MIB), timeout=5)
        call = partial(stub.BeginPush, begin(version=9, total_bytes=8 * MIB), timeout=5)
        assert exhausted(call).metadata["promised_bytes"] == str(8 * MIB)
        stub.AbortPush(pb.AbortPushRequest(push_id=one.push_id), timeout=5)
        stub.AbortPush(pb.AbortPushRequest(push_id=call().push_id), timeout=5)
        # One that does not declare its size is refused with its first shard.
        disk.fill(leave=3 * MIB)
        assert exhausted(lambda: push(stub, 4 * MIB, 1)).reason is Reason.DISK_EXHAUSTED
        assert pulled(stub) == held
        disk.empty()
        push(stub, 4 * MIB, 1)


@mounts
def test_a_full_disk_is_told_before_anybody_pushes() -> None:
    flags = ("--disk-floor-bytes", str(MIB))
    with serving(*flags, store="", disk="size=16m") as server, Client(server.address) as client:
        assert server.process is not None
        disk = Disk(Path(f"/proc/{server.process.pid}/root"), server.state_dir)
        assert client.health("push")
        disk.fill(leave=MIB)
        within(10, lambda: not client.health("push"))
        folders = {one.folder: one for one in client.status().disks}
        assert folders["store"].error.startswith("free space on the disk of ")
        assert folders["store"].free_bytes == MIB
        assert folders["store"].used_bytes == 15 * MIB
        assert exhausted(lambda: push(server.stub, 1000)).reason is Reason.DISK_EXHAUSTED
        disk.empty()
        within(10, lambda: client.health("push"))
        assert not {one.folder for one in client.status().disks if one.error} - {"shm"}
        push(server.stub, 1000)
        assert "nothing more is written to store: free space on the disk of" in server.log


@mounts
def test_a_disk_that_others_fill_during_chunks_manifest_and_records() -> None:
    shard = one_shard(4 * MIB, 1)
    with small_disk("size=32m") as (stub, disk):
        push(stub, 4 * MIB)
        held, newest = pulled(stub), model_status(stub).newest_version
        before = disk.free()

        def opened() -> str:
            return stub.BeginPush(begin(total_bytes=len(shard.data)), timeout=5).push_id

        def send(push_id: str, messages: list[Message]) -> None:
            join = Message(join=pb.JoinPush(push_id=push_id))
            stub.PushWeights(iter([join, *messages]), timeout=10)

        def commit(push_id: str) -> pb.CommitPushResponse:
            return stub.CommitPush(pb.CommitPushRequest(push_id=push_id), timeout=10)

        def verified(push_id: str) -> bool:
            shards = stub.GetPush(pb.GetPushRequest(push_id=push_id), timeout=5).shards
            return all(shard.verified for shard in shards)

        # While its chunks come.
        push_id = opened()
        send(push_id, [*shard.layout(), *shard.chunks()[:2]])
        disk.fill()

        def rest() -> None:
            send(push_id, shard.chunks(start=2 * MIB))
            commit(push_id)

        assert exhausted(rest).reason is Reason.DISK_EXHAUSTED
        disk.empty()
        within(5, lambda: disk.free() >= before - 64 * 1024)
        # When its manifest and commit record are due, and for every other record.
        push_id = opened()
        send(push_id, shard.all())
        within(10, partial(verified, push_id))
        disk.fill()
        assert exhausted(partial(commit, push_id)).reason is Reason.DISK_EXHAUSTED
        assert disk.free() > 0, "what the failed push had stored is removed"
        disk.empty()
        disk.fill()
        acquire = pb.AcquireEpochRequest(model=MODEL, holder="t")
        assert exhausted(lambda: stub.AcquireEpoch(acquire, timeout=5))
        pin = pb.PinVersionRequest(model=MODEL, version=FIRST, pinned=True)
        assert exhausted(lambda: stub.PinVersion(pin, timeout=5))
        (version,) = stub.ListVersions(pb.ListVersionsRequest(model=MODEL), timeout=5).versions
        assert (version.version, version.pinned) == (newest, False)
        assert pulled(stub) == held
        # Room returns.
        disk.empty()
        epoch = stub.AcquireEpoch(acquire, timeout=5).epoch
        stub.PinVersion(pin, timeout=5)
        assert push(stub, 4 * MIB, 1, epoch=epoch).durable


@mounts
def test_a_journal_without_room_refuses_applies_and_the_served_version_goes_on() -> None:
    size = 1000

    def weight(seed: int) -> bytes:
        shard = one_shard(size, seed)
        return shard.data[-size:]

    flags = ("--disk-floor-bytes", str(MIB), "--slots", "4")
    with serving(*flags, store="", disk="size=16m") as server, contextlib.ExitStack() as stack:
        checkpoint = {"weight": ("U8", (size,), weight(0))}
        engine = stack.enter_context(memory_bridge(server.run_dir, checkpoint))
        assert server.process is not None
        disk = Disk(Path(f"/proc/{server.process.pid}/root"), server.state_dir)
        stub = server.stub
        server.wait_serving()
        versions = [push(stub, size, seed).version for seed in (1, 2)]

        def switch(number: int) -> None:
            version = versions[number % 2]
            if model_status(stub).live_version > version:
                stub.Rollback(pb.RollbackRequest(model=MODEL), timeout=10)
            else:
                apply = pb.ApplyVersionRequest(model=MODEL, version=version, clear_rejected=True)
                stub.ApplyVersion(apply, timeout=10)

        switch(0)
        switch(1)
        disk.fill()
        # What is left of the journal's last page is room for some more.
        done = 0

        def until_refused() -> None:
            nonlocal done
            for number in range(100):
                switch(number)
                done += 1

        error = exhausted(until_refused)
        assert error.reason is Reason.DISK_EXHAUSTED
        assert "journal" in error.message
        model = server.wait_serving()
        served = {version: weight(1 + i) for i, version in enumerate(versions)}
        assert engine.live["weight"] == served[model.live_version]
        assert stub.VerifyVersion(pb.VerifyVersionRequest(model=MODEL), timeout=10).ranks
        disk.empty()
        switch(done)
        live = model_status(stub).live_version
        assert live != model.live_version
        assert engine.live["weight"] == served[live]


@mounts
def test_no_names_left_on_the_disk() -> None:
    with small_disk("size=64m,nr_inodes=64") as (stub, disk):
        push(stub, MIB)
        disk.fill_names()
        error = exhausted(lambda: push(stub, MIB, 1))
        assert error.reason is Reason.DISK_EXHAUSTED
        assert len(pulled(stub)) > MIB
        disk.empty_names()
        assert push(stub, MIB, 1).durable


def test_no_shared_memory_left() -> None:
    with serving("--memory-bytes", str(40 * MIB), "--slots", "2") as server:
        stub = server.stub
        push(stub, 16 * MIB)
        held = pulled(stub)
        for call in (
            lambda: stub.BeginPush(begin(total_bytes=30 * MIB), timeout=5),
            lambda: push(stub, 30 * MIB, 1),
        ):
            error = exhausted(call)
            assert error.reason is Reason.MEMORY_EXHAUSTED
            assert str(40 * MIB) in error.message
        assert pulled(stub) == held
        push(stub, 16 * MIB, 1)


def test_a_pull_that_finds_no_slot_is_told_why_at_once() -> None:
    with serving("--slots", "2", store="") as server:
        stub = server.stub
        versions = [push(stub, 1000, seed).version for seed in range(3)]
        held = pulled(stub, versions[0])
        for version in versions[1:]:
            pulled(stub, version)
            stub.PinVersion(
                pb.PinVersionRequest(model=MODEL, version=version, pinned=True), timeout=5
            )
        request = pb.PullWeightsRequest(model=MODEL, version=versions[0])
        started = time.monotonic()
        error = exhausted(lambda: list(stub.PullWeights(request, timeout=30)))
        assert error.reason is Reason.NO_SLOT
        assert "pinned" in error.message
        with Client(server.address) as client, pytest.raises(ExhaustedError, match="pinned"):
            next(client.tensors(versions[0]))
        assert time.monotonic() - started < 5
        stub.PinVersion(pb.PinVersionRequest(model=MODEL, version=version), timeout=5)
        assert pulled(stub, versions[0]) == held


@mounts
def test_a_full_dev_shm_hinders_nobody() -> None:
    # Segments are memfds: they neither need nor fill the mount that vLLM's queues live in.
    with small_disk("size=64m") as (stub, disk):
        shm = disk.other("/dev/shm")
        shm.fill()
        assert shm.free() == 0
        push(stub, 4 * MIB)


@contextlib.contextmanager
def limited(pids: list[int], limit: int, value: int) -> Iterator[None]:
    """Set the soft limit of running processes for a while."""
    before = {pid: resource.prlimit(pid, limit) for pid in pids}
    for pid in pids:
        resource.prlimit(pid, limit, (value, before[pid][1]))
    try:
        yield
    finally:
        for pid in pids:
            resource.prlimit(pid, limit, before[pid])


def test_no_descriptors_left() -> None:
    with serving(store="") as server:
        assert server.process is not None
        pid, stub = server.process.pid, server.stub
        push(stub, 8 * MIB)
        held = pulled(stub)
        # A connection of its own, not one that another channel has.
        own = [("grpc.use_local_subchannel_pool", 1)]
        with limited([pid], resource.RLIMIT_NOFILE, descriptors(pid) - 1):
            # A larger shard, which no spare segment fits.
            assert exhausted(lambda: push(stub, 32 * MIB, 1))
            assert pulled(stub) == held
            # Nobody new gets in.
            with (
                grpc.insecure_channel(server.address, own) as channel,
                pytest.raises(grpc.FutureTimeoutError),
            ):
                grpc.channel_ready_future(channel).result(1)
        assert push(stub, 32 * MIB, 1).durable
        with grpc.insecure_channel(server.address, own) as channel:
            grpc.channel_ready_future(channel).result(10)


def test_no_descriptors_left_in_the_fetchers() -> None:
    with serving(store="") as server:
        assert server.process is not None
        stub = server.stub
        push(stub, MIB)
        _, *children = descendants(server.process.pid)
        with limited(children, resource.RLIMIT_NOFILE, 4):
            assert exhausted(lambda: push(stub, 32 * MIB, 1))
        assert push(stub, 32 * MIB, 1).durable


def test_files_may_not_grow_further() -> None:
    with serving(store="") as server:
        assert server.process is not None
        stub = server.stub
        push(stub, 2 * MIB)
        everything = descendants(server.process.pid)
        # In the fetchers the store's files, in the server the segments too.
        for pids, reason, size in (
            (everything[1:], Reason.DISK_EXHAUSTED, 32 * MIB),
            (everything, Reason.MEMORY_EXHAUSTED, 64 * MIB),
        ):
            with limited(pids, resource.RLIMIT_FSIZE, MIB):
                error = exhausted(partial(push, stub, size, 1))
                assert error.reason is reason
                assert f"this process may write {MIB} bytes per file" in error.message
                assert len(pulled(stub)) > 2 * MIB
        assert push(stub, 32 * MIB, 1).durable


def address_space(pid: int) -> int:
    """Return how many bytes of addresses a process has taken."""
    pages = Path(f"/proc/{pid}/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()


@pytest.mark.parametrize("where", ["server", "fetchers"])
def test_the_kernel_gives_no_more_memory(where: str) -> None:
    # The budget allows it; mapping a segment fails all the same, with ENOMEM.
    with serving(store="") as server, contextlib.ExitStack() as stack:
        assert server.process is not None
        stub = server.stub
        push(stub, 2 * MIB)
        held = pulled(stub)
        first, *children = descendants(server.process.pid)
        for pid in [first] if where == "server" else children:
            # Room for what a call needs, also for a thread and its stack, and not for the shard.
            stack.enter_context(limited([pid], resource.RLIMIT_AS, address_space(pid) + 48 * MIB))
        for seed in (1, 2):
            error = exhausted(lambda seed=seed: push(stub, 96 * MIB, seed))  # type: ignore[misc]
            assert error.reason is Reason.MEMORY_EXHAUSTED
            assert "Cannot allocate memory" in error.message
            assert pulled(stub) == held
        assert push(stub, 2 * MIB, 1).durable, "what fits goes on"
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        assert status.fetchers == len(children)
        assert [p for p in descendants(server.process.pid)[1:] if p not in children] == []
        assert not any(status.invariant_violations.values())
        stack.close()
        assert push(stub, 96 * MIB, 3).durable
