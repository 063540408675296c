"""Where fleets of tests decide: real registers."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tests.support.etcd import Etcd
from tests.support.object_servers import moto

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

__all__ = ["FolderPlace", "RegisterPlace", "place_of"]


@dataclass
class RegisterPlace:
    """One register.

    Attributes:
        url: What `--fleet-register` names.
        variables: Environment variables that its callers need.
    """

    url: str
    variables: Mapping[str, str] = field(default_factory=dict)


class FolderPlace(RegisterPlace):
    """A folder of this host, which can be away for a while."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "register"
        super().__init__(self._folder.as_uri())

    def down(self) -> None:
        """Let it answer nobody."""
        self._folder.rename(self._folder.with_name("away"))

    def up(self) -> None:
        """Let it answer again, with all that it had."""
        self._folder.with_name("away").rename(self._folder)


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
            yield RegisterPlace(cluster.url("weightsync"))
        finally:
            cluster.close()
    else:
        with moto(folder) as bucket:
            yield RegisterPlace(f"{bucket.url}/decisions", bucket.environment())
