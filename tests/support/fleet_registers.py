"""Where fleets of tests decide: real registers, which can be away for a while."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import TYPE_CHECKING, Protocol

from tests.support.etcd import Etcd
from tests.support.object_servers import moto

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["BucketPlace", "EtcdPlace", "FolderPlace", "RegisterPlace", "place_of"]


_NONE: Mapping[str, str] = {}


class RegisterPlace(Protocol):
    """One register.

    Attributes:
        url: What `--fleet-register` names.
        variables: Environment variables that its callers need.
    """

    url: str
    variables: Mapping[str, str]

    def down(self) -> None:
        """Let it answer nobody."""

    def up(self) -> None:
        """Let it answer again, with all that it had."""


class FolderPlace:
    """A folder of this host."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "register"
        self.url, self.variables = self._folder.as_uri(), _NONE

    def down(self) -> None:
        self._folder.rename(self._folder.with_name("away"))

    def up(self) -> None:
        self._folder.with_name("away").rename(self._folder)


class EtcdPlace:
    """Three nodes of etcd, two of which are killed and started again."""

    def __init__(self, cluster: Etcd) -> None:
        self._cluster = cluster
        self.url, self.variables = cluster.url("weightsync"), _NONE

    def down(self) -> None:
        for number in (0, 1):
            self._cluster.signal(number, signal.SIGKILL)

    def up(self) -> None:
        for number in (0, 1):
            self._cluster.start(number)


class BucketPlace:
    """A bucket, whose server is frozen."""

    def __init__(self, url: str, variables: Mapping[str, str], pid: int) -> None:
        self.url, self.variables, self._pid = url, variables, pid

    def down(self) -> None:
        os.kill(self._pid, signal.SIGSTOP)

    def up(self) -> None:
        os.kill(self._pid, signal.SIGCONT)


@contextlib.contextmanager
def place_of(kind: str, etcd: str, folder: Path) -> Iterator[RegisterPlace]:
    """Run a register until the end of the block.

    Args:
        kind: folder, etcd or bucket.
        etcd: The program.
        folder: For what it keeps.
    """
    if kind == "folder":
        yield FolderPlace(folder)
    elif kind == "etcd":
        cluster = Etcd(etcd, folder, 3)
        try:
            yield EtcdPlace(cluster)
        finally:
            cluster.close()
    else:
        with moto(folder) as bucket:
            place = BucketPlace(f"{bucket.url}/decisions", bucket.environment(), bucket.pid)
            try:
                yield place
            finally:
                # A frozen one does not end.
                place.up()
