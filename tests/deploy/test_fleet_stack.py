"""The fleet's compose file at work: its own command lines, users and volumes, in namespaces.

etcd and the servers are the real ones. moto is in the place of MinIO, which Debian does not have,
and the engine for tests in that of vLLM, which test_stack.py starts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import sys
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.deploy.compose_file import load
from tests.deploy.conftest import require_namespaces
from tests.deploy.containers import Stack
from tests.deploy.test_fleet_compose import FILE, SECRETS, SERVERS
from tests.support.following import until
from tests.support.memory_bridge import memory_bridge
from tests.support.object_servers import MOTO, MOTO_PROGRAM
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.deploy.compose_file import Service

pytestmark = pytest.mark.timeout(300)

_MEMORY_BYTES = 64 << 20


def _weights(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 256), seed, np.float32), "b": np.zeros(3, np.float32) + seed}


def _checkpoint() -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    return {
        name: ("F32", tuple(array.shape), array.tobytes()) for name, array in _weights(1).items()
    }


def _adapted(service: Service, number: int) -> Service:
    """Give a server ports of its own: all of them are in one network namespace here."""
    port = 50600 + number
    argv = [part.replace(":50551", f":{port}") for part in service.argv]
    argv += ["--metrics=", f"--memory-bytes={_MEMORY_BYTES}", "--fetchers=1"]
    variables = {"WEIGHTSYNC_ADDRESS": f"127.0.0.1:{port}"}
    return dataclasses.replace(service, argv=argv, environment={**service.environment, **variables})


def _store(service: Service) -> Service:
    """Put moto in MinIO's place; its port is the one that the servers are given."""
    (flag,) = (part for part in service.argv if part.startswith("--address="))
    command = [*MOTO_PROGRAM, "-p", flag.rpartition(":")[2]]
    return dataclasses.replace(
        service,
        argv=command,
        environment={**service.environment, "PYTHONPATH": str(MOTO)},
        healthcheck=[sys.executable, "-c", _MAKE_BUCKET],
    )


#: What the service `bucket` does, as far as moto knows of it.
_MAKE_BUCKET = """
import urllib.request as r
r.urlopen(r.Request("http://minio:9000/weights", method="PUT"), timeout=5)
"""


@pytest.fixture(scope="module")
def stack(docker_compose: str, etcd: str, program: Callable[[str, str], str]) -> Iterator[Stack]:
    """Everything but vLLM, healthy by its own healthcheck, with an engine for each follower."""
    require_namespaces()
    del etcd
    program("etcdctl", "etcd-client")
    secrets = {name: f"of-{name.lower()}" for name in SECRETS}
    found = load(docker_compose, FILE.name, variables={"MODEL_DIR": "/model", **secrets})
    found |= {name: _adapted(found[name], number) for number, name in enumerate(SERVERS)}
    found["minio"] = _store(found["minio"])
    # The service that it waits for has done its work and is gone.
    del found["origin"].raw["depends_on"]
    with Stack(found) as running, contextlib.ExitStack() as engines:
        running.start("etcd").wait_healthy(60)
        running.start("minio").wait_healthy(60)
        running.start("origin").wait_healthy(60)
        for name, sockets in (("follower-1", "sockets-1"), ("follower-2", "sockets-2")):
            follower = running.start(name)
            folder = running.volume(sockets)
            engines.enter_context(memory_bridge(folder, _checkpoint()))
            os.chown(folder / "engine.sock", 0, follower.service.gid)
            (folder / "engine.sock").chmod(0o660)
            follower.wait_healthy(60)
        yield running


def _live(stack: Stack) -> dict[str, tuple[str, int]]:
    """Return what `fleet members` says inside of a follower."""
    ran = stack.containers["follower-2"].run("weightsync", "fleet", "members", "--json")
    members = json.loads(ran.stdout) if ran.returncode == 0 else []
    return {one["name"]: (one["state"], one["live_version"]) for one in members}


def _decided(stack: Stack) -> int:
    """Return which version the register says is decided; 0: none, or it does not answer."""
    ran = stack.containers["follower-2"].run("weightsync", "fleet", "status", "--json")
    return int(json.loads(ran.stdout)["decided_version"]) if ran.returncode == 0 else 0


def _push(stack: Stack, seed: int) -> int:
    with Client(f"unix:{stack.volume('clients')}/weightsync.sock") as client:
        return client.push(_weights(seed)).version


def test_a_pushed_version_is_applied_on_every_follower(stack: Stack) -> None:
    until(lambda: len(_live(stack)) == 2, "both are members")
    version = _push(stack, 2)
    ran = stack.containers["follower-1"].run(
        "weightsync", "fleet", "apply", str(version), "--order", "barrier"
    )
    assert ran.returncode == 0, ran.stderr
    assert "COMMIT" in ran.stdout
    wanted = {"follower-1": ("serving", version), "follower-2": ("serving", version)}
    until(lambda: _live(stack) == wanted, "both serve it")
    # What vLLM's readiness check asks.
    ran = stack.containers["follower-1"].run(
        "weightsync", "status", "--exit-code", "--service", "serving"
    )
    assert ran.returncode == 0, ran.stdout


def test_followers_take_no_pushes(stack: Stack) -> None:
    ran = stack.containers["follower-1"].run(
        "weightsync", "status", "--exit-code", "--service", "push"
    )
    assert ran.returncode != 0


def test_the_sockets_of_a_pair_are_for_its_group_alone(stack: Stack) -> None:
    for volume, names in (
        ("clients", ["weightsync.sock"]),
        ("sockets-1", ["read.sock", "segments.sock"]),
    ):
        for name in names:
            entry = (stack.volume(volume) / name).stat()
            assert entry.st_mode & 0o777 == 0o660, name
            assert entry.st_gid == stack.services["follower-1"].gid


def test_etcd_keeps_what_was_decided(stack: Stack) -> None:
    """Last: it is killed here, and started again on its volume as Docker does."""
    decided = _decided(stack)
    assert decided
    etcd = stack.containers["etcd"]
    os.kill(etcd.pid, signal.SIGKILL)
    etcd.kill()
    root = stack.folder / "roots" / "etcd"
    root.rename(root.with_name("etcd-before"))
    stack.start("etcd").wait_healthy(60)
    until(lambda: _decided(stack) == decided, "what was decided is there again")
    assert set(_live(stack).values()) <= {("serving", decided)}
    version = _push(stack, 3)
    wanted = {"follower-1": ("serving", version), "follower-2": ("serving", version)}

    def applied() -> bool:
        words = ("weightsync", "fleet", "apply", str(version), "--timeout", "60")
        return stack.containers["follower-2"].run(*words).returncode == 0

    until(applied, "it is applied once members have come back", 120)
    until(lambda: _live(stack) == wanted, "both serve it")
