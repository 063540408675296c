"""Two hosts with a cable between them: network namespaces, which need root and ip(8)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

__all__ = ["FAR", "NEAR", "NetworkHosts", "network_hosts"]

NEAR, FAR = "10.213.7.1", "10.213.7.2"


@dataclass(frozen=True)
class NetworkHosts:
    """The namespaces.

    Attributes:
        near: Name of the one with the address NEAR.
        far: Name of the other.
        link: Name of the near end of the cable.
    """

    near: str
    far: str
    link: str

    def on_near(self) -> list[str]:
        """Return what a command line begins with that runs on the near host."""
        return ["ip", "netns", "exec", self.near]

    def on_far(self, names: Path, command: Sequence[str]) -> list[str]:
        """Return the command line that runs on the far host, where `names` is its /etc/hosts."""
        named = f'mount --bind {names} /etc/hosts && exec "$@"'
        return ["ip", "netns", "exec", self.far, "sh", "-c", named, "sh", *command]

    def cut(self) -> None:
        """Unplug the near end: whatever is sent from now on is lost, and nobody is told."""
        _ip("-n", self.near, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Plug it in again."""
        _ip("-n", self.near, "link", "set", self.link, "up")


@contextlib.contextmanager
def network_hosts() -> Iterator[NetworkHosts]:
    """Make the hosts; the test is skipped where that cannot be."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and ip(8)")
    near, far = (f"weightsync-{os.getpid()}-{end}" for end in ("near", "far"))
    links = [f"ws{os.getpid()}{end}" for end in "nf"]
    with contextlib.ExitStack() as stack:
        for name in (near, far):
            try:
                _ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespace can be made: {error.stderr.decode()}")
            stack.callback(_ip, "netns", "del", name)
        _ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for name, link, address in zip((near, far), links, (NEAR, FAR), strict=True):
            _ip("link", "set", link, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            _ip("-n", name, "link", "set", link, "up")
            _ip("-n", name, "link", "set", "lo", "up")
        yield NetworkHosts(near, far, links[0])


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
