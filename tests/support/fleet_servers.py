"""Fleets of real servers: an origin that takes pushes, and its followers, all of them members."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from tests.support.following import FollowingServer, checkpoint, step, until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.fleet_registers import RegisterPlace
    from weightsync_client import Client

__all__ = ["FleetServers", "all_serve", "live", "push"]


class FleetServers:
    """Servers with the engine for tests.

    Args:
        folder: Of theirs; a short path.
        place: Their register.
        names: Of members, the first of which is the origin.

    Attributes:
        servers: By name.
        names: As given.
    """

    def __init__(
        self, folder: Path, place: RegisterPlace, names: tuple[str, ...] = ("a", "b", "c")
    ) -> None:
        self._folder, self._place, self.names = folder, place, names
        self.servers = {name: self._server(name) for name in names}

    def _server(self, name: str) -> FollowingServer:
        flags = ["--fleet", "f", "--fleet-register", self._place.url]
        flags += ["--fleet-member", name, "--undecided-limit-s", "3", "--slots", "3"]
        flags += ["--metrics", "127.0.0.1:0"]
        if name != self.names[0]:
            flags += ["--follow", f"file://{self._folder / self.names[0] / 'state' / 'store'}"]
        return FollowingServer(self._folder / name, *flags, variables=self._place.variables)

    @contextlib.contextmanager
    def running(self, *names: str) -> Iterator[dict[str, Client]]:
        """Run some, or all, until the block ends."""
        with contextlib.ExitStack() as stack:
            yield {
                name: stack.enter_context(self.servers[name].running())
                for name in names or self.names
            }


def live(client: Client) -> int:
    """Return what a server serves; 0: nothing."""
    (model,) = client.status().models
    return model.live_version if client.health("serving") else 0


def push(client: Client, number: int) -> int:
    """Push a version whose content no other number has, and return it."""
    return client.push(step(checkpoint(1), number), delta="never").version


def all_serve(clients: dict[str, Client], version: int) -> None:
    """Return when all serve a version."""
    until(
        lambda: {live(client) for client in clients.values()} == {version},
        f"all serve {version}",
    )
