"""A fleet that has decided, and a host that comes after it with nothing."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path
from typing import Any

from benchmarks.fleet.decisions import until_members
from benchmarks.fleet.linked_servers import linked_server, own_address
from benchmarks.fleet.shaped_links import LinkedHost
from benchmarks.fleet.transfers import Running, Samples, Site, follower
from weightsync_client import Client, ClientError

__all__ = ["fleet_flags", "late_joiner"]

_SERVES_S = 120.0


def fleet_flags(register: str) -> tuple[str, ...]:
    """Return the flags of a follower that is a member of the fleet."""
    return ("--fleet", "bench", "--fleet-register", register, "--fleet-member", "{name}")


def late_joiner(
    site: Site, running: Running, late: LinkedHost, register: str, rounds: int
) -> Samples:
    """Have the fleet decide on the newest version, and start a server that has nothing.

    `late_joiner_s` is from its start until its engine serves the version that was decided,
    `start_s` that of a server without fleet and origin, which serves its own checkpoint.

    Args:
        site: Where.
        running: From `following`; the followers are members.
        late: The host of those that are started.
        register: URL of the fleet's register.
        rounds: How often, each time with a folder of its own.
    """
    with Client(own_address(running.folders[site.source.name])) as origin:
        decided = max(one.version for one in origin.versions())
    with Client(own_address(running.folders[next(iter(site.hosts))])) as member:
        until_members(member, len(site.hosts))
        member.fleet_apply(decided, order="barrier")
    joined, started = [], []
    for number in range(rounds):
        folder = site.folder / f"late{number}"
        server = follower(site, running.way, late, folder, *fleet_flags(register))
        joined.append(_until_serving(server, folder, decided))
        folder = site.folder / f"alone{number}"
        alone = linked_server(late, folder, site.trust, *site.engine())
        started.append(_until_serving(alone, folder, 0))
    return {"late_joiner_s": joined, "start_s": started}


def _until_serving(
    server: contextlib.AbstractContextManager[Any], folder: Path, version: int
) -> float:
    """Return how long a server takes until it serves a version; 0: any."""
    begun = time.monotonic()
    with server, Client(own_address(folder)) as client:
        while not _serves(client, version):
            if time.monotonic() > begun + _SERVES_S:
                log = (folder / "server.log").read_text()
                msg = f"a late server does not serve version {version}:\n{log[-2000:]}"
                raise TimeoutError(msg)
            time.sleep(0.02)
        return time.monotonic() - begun


def _serves(client: Client, version: int) -> bool:
    with contextlib.suppress(ClientError):
        if client.health("serving"):
            (model,) = client.status().models
            return model.live_version == version or not version
    return False
