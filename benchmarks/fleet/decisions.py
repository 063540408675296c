"""Barriers of a fleet that move no bytes: from the last host that is ready to the last that knows.

Every host is a real server with an engine in memory and a model of some kilobytes; three etcd on
loopback are the register. Links are not limited.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.fleet.arrivals import arrivals
from benchmarks.fleet.clocked_server import CLOCK
from benchmarks.fleet.pushing_trainer import change, make_tensors, save_model
from benchmarks.servers import weightsync_server
from tests.support.etcd import Etcd
from weightsync_client import Client
from weightsync_server.coordination import open_register

__all__ = ["decisions", "until_members"]

_MODEL_BYTES = 64 << 10
_STAGED_S, _MEMBERS_S = 60.0, 60.0
_CREATES = 200
_Notes = dict[tuple[str, int], list[float]]


def decisions(folder: Path, etcd: Etcd, hosts: int, count: int) -> dict[str, list[float]]:
    """Apply so many versions to a fleet by barriers, one after the other.

    Args:
        folder: For servers; a short path.
        etcd: The register.
        hosts: How many members; the first takes the pushes, the others follow it.
        count: How many decisions.
    """
    model = folder / "model.safetensors"
    save_model(model, _MODEL_BYTES)
    names = [f"m{number}" for number in range(hosts)]
    register = etcd.url("decisions")
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.enter_context(_member(folder, name, names[0], register, model))
        addresses = {name: _address(folder, name) for name in names}
        clients = [stack.enter_context(Client(address)) for address in addresses.values()]
        until_members(clients[0], hosts)
        staged = stack.enter_context(arrivals(addresses))
        tensors, apply_s, versions = make_tensors(_MODEL_BYTES), [], []
        for number in range(count + 1):
            change(tensors)
            version = clients[0].push(tensors, delta="never").version
            staged.everywhere(version, _STAGED_S)
            begun = time.monotonic()
            clients[number % hosts].fleet_apply(version, order="barrier")
            apply_s.append(time.monotonic() - begun)
            versions.append(version)
        # The first one begins a fleet: some records are there for the first time.
        notes = _notes([_clock(folder, name) for name in names])
        found = [_times(notes, version, hosts) for version in versions[1:]]
    create_to_read = asyncio.run(_create_to_read(etcd.url("probe"), _CREATES))
    return {
        "decision_s": [read - ready for ready, read, _ in found],
        "skew_s": [skew for _, _, skew in found],
        "barrier_s": apply_s[1:],
        "create_to_read_s": create_to_read,
    }


def until_members(client: Client, count: int) -> None:
    """Return when a fleet has so many members that serve.

    Raises:
        TimeoutError: It does not come to that.
    """
    end = time.monotonic() + _MEMBERS_S
    while sum(one.state == "serving" for one in client.fleet_status().members) < count:
        if time.monotonic() > end:
            msg = f"the fleet does not serve: {client.fleet_status().members}"
            raise TimeoutError(msg)
        time.sleep(0.1)


def _address(folder: Path, name: str) -> str:
    return f"unix:{folder}/{name}/server.sock"


def _clock(folder: Path, name: str) -> Path:
    return folder / name / "clock"


@contextlib.contextmanager
def _member(folder: Path, name: str, origin: str, register: str, model: Path) -> Iterator[None]:
    own = folder / name
    own.mkdir()
    follow = () if name == origin else ("--follow", f"grpc://{_address(folder, origin)}")
    fleet = ("--fleet", "f", "--fleet-register", register, "--fleet-member", name)
    with weightsync_server(
        own,
        [_address(folder, name)],
        *("--model", str(model), "--fetchers", "1", *follow, *fleet),
        engine="memory",
        store="",
        environment={CLOCK: str(_clock(folder, name))},
        program="benchmarks.fleet.clocked_server",
    ):
        yield


def _notes(files: list[Path]) -> _Notes:
    notes: _Notes = {}
    for file in files:
        for line in file.read_text().splitlines():
            what, version, at = json.loads(line)
            notes.setdefault((what, version), []).append(at)
    return notes


def _times(notes: _Notes, version: int, hosts: int) -> tuple[float, float, float]:
    """Return when the last was ready, when the last had read, and how long until all were live."""
    found = [notes.get((what, version), []) for what in ("ready", "read", "live")]
    if any(len(one) != hosts for one in found):
        msg = f"of version {version} not every member has noted everything: {found}"
        raise RuntimeError(msg)
    ready, read, live = found
    return max(ready), max(read), max(live) - min(live)


async def _create_to_read(url: str, count: int) -> list[float]:
    """Return how long a key takes from its creation until another connection has read it.

    The other one watches, as members do. A decision is two of that at least: the last record of a
    member, and the decision.
    """
    writer, reader = open_register(url), open_register(url)
    found = []
    async with contextlib.aclosing(reader.watch("keys/")) as hints:
        await anext(hints)
        for number in range(count):
            key, begun = f"keys/{number}", time.monotonic()
            creating = asyncio.create_task(writer.create(key, b"{}"))
            async for changed in hints:
                if key in changed and await reader.get(key) is not None:
                    break
            found.append(time.monotonic() - begun)
            await creating
    await writer.close()
    await reader.close()
    return found
