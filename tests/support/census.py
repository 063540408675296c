"""What a server holds: taken before and after an attack, the two must be equal."""

from __future__ import annotations

import contextlib
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.support.weightsync_server import WeightSyncServer

__all__ = ["Census", "same_again", "settled"]

_SEGMENT = "/memfd:weightsync"


@dataclass(frozen=True)
class Census:
    """Everything that could be left behind.

    Attributes:
        descriptors: Open in the server, without segments and connections.
        children: Processes of the server.
        stray_bytes: Bytes of segments that it holds open beyond what its slots reserve.
        retired_bytes: Bytes that count in the budget beyond what its slots reserve.
        pushes: Ids of open pushes.
        leases: Readers of slots.
        files: Names in the state directory, store included.
        versions: Content digest by version.
        live: The version that is served.
        violations: What the server itself counts.
    """

    descriptors: int
    children: int
    stray_bytes: int
    retired_bytes: int
    pushes: tuple[str, ...]
    leases: int
    files: tuple[str, ...]
    versions: tuple[tuple[int, str], ...]
    live: int
    violations: int

    @classmethod
    def take(cls, server: WeightSyncServer) -> Census:
        """Count what the server holds now."""
        assert server.process is not None
        stub = server.stub
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=10)
        listed = stub.ListVersions(pb.ListVersionsRequest(model="default"), timeout=10)
        model = status.models[0]
        process = psutil.Process(server.process.pid)
        # The channels of these questions are the server's too.
        server.close_channels()
        slots = sum(slot.reserved_bytes for slot in model.slots)
        links = _links(server.process.pid)
        root = server.state_dir
        return cls(
            descriptors=sum(not link.startswith(("socket:", _SEGMENT)) for link in links),
            children=len(process.children()),
            stray_bytes=sum(_segments(server.process.pid).values()) - slots,
            retired_bytes=status.memory_reserved_bytes - slots,
            pushes=tuple(push.push_id for push in model.pushes),
            leases=sum(slot.leases for slot in model.slots),
            files=tuple(sorted(str(p.relative_to(root)) for p in root.rglob("*") if _counts(p))),
            versions=tuple((v.version, v.content_digest) for v in listed.versions),
            live=model.live_version,
            violations=sum(status.invariant_violations.values()),
        )


def _counts(path: Path) -> bool:
    # Epoch, marks and what engines refused are written when they are first needed, and stay.
    return path.name not in ("epoch.json", "marks.json", "refused.json")


def _links(pid: int) -> list[str]:
    found = []
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.append(str(entry.readlink()))
    return found


def _segments(pid: int) -> dict[int, int]:
    """Return size by inode of each segment."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(entry.readlink()).startswith(_SEGMENT):
                status = entry.stat()
                found[status.st_ino] = status.st_size
    return found


def settled(take: Callable[[], Census], timeout_s: float = 10.0) -> Census:
    """Return what a server holds once two counts in a row are equal.

    What was asked for before may still end in the background: a count in the midst of it is of no
    use to compare with.

    Raises:
        AssertionError: It does not come to rest.
    """
    deadline = time.monotonic() + timeout_s
    before, after = take(), take()
    while before != after:
        assert time.monotonic() < deadline, _differences(before, after)
        time.sleep(0.1)
        before, after = after, take()
    return after


def same_again(take: Callable[[], Census], before: Census, timeout_s: float = 10.0) -> None:
    """Wait until a server holds what it held before.

    Raises:
        AssertionError: It does not, with what differs.
    """
    deadline = time.monotonic() + timeout_s
    while changed := _differences(before, _at_least(take(), before)):
        assert time.monotonic() < deadline, changed
        time.sleep(0.1)


def _at_least(after: Census, before: Census) -> Census:
    # One that was open for a moment when it was counted first is no loss.
    return replace(after, descriptors=max(after.descriptors, before.descriptors))


def _differences(before: Census, after: Census) -> dict[str, tuple[Any, Any]]:
    old, new = asdict(before), asdict(after)
    return {name: (old[name], value) for name, value in new.items() if value != old[name]}
