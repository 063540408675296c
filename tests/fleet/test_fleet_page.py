"""The commands of docs/how-to/fleets.md as they stand there, typed one after the other.

Only names of hosts, folders and ports are those of this machine; engine, sockets and state come by
environment variables, which a user sets as well.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.certificates import Authority
from tests.support.etcd import ProtectedEtcd, free_ports
from tests.support.fleet_page import commands
from tests.support.following import until
from tests.support.object_servers import ObjectServer, moto
from tests.support.secured import authority_text
from tests.support.serving import wait_serving
from weightsync_client import Access, Client, ClientError, Residency
from weightsync_server.auth.principals import new_token, token_hash

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

pytestmark = pytest.mark.timeout(240)

_BIN = Path(sys.executable).parent
_START_S = 60.0
_HOST, _ETCD = "trainer0:50551", "e0:2379,e1:2379,e2:2379"
_SERVERS = commands("weightsync-server")
_ORIGINS = [line for line in _SERVERS if "--engine none" in line]
_FOLLOWERS = [line for line in _SERVERS if "--follow" in line and "--fleet" not in line]
_PAIRS = list(zip(_ORIGINS, _FOLLOWERS, strict=True))


def _weights(seed: int) -> dict[str, np.ndarray]:
    return {"w": np.full((64, 64), seed, np.float32), "b": np.zeros(3, np.float32)}


class Site:
    """A machine on which the page's commands may be typed.

    Args:
        folder: In place of the root; a short path.
        bucket: Of the S3 URLs.
    """

    def __init__(self, folder: Path, bucket: ObjectServer) -> None:
        self.folder = folder
        self.authority = Authority(folder / "pki")
        self.port, self.token = free_ports(1)[0], new_token()
        self._bucket = bucket
        self.places = {
            _HOST: f"localhost:{self.port}",
            "/etc/weightsync": str(folder / "etc"),
            "/mnt/weights": str(folder / "mnt"),
        }
        self._write()

    def _write(self) -> None:
        settings = self.folder / "etc"
        settings.mkdir()
        (self.folder / "mnt").mkdir()
        pair = self.authority.sign("origin", "localhost")
        pair.certificate.rename(settings / "tls.crt")
        pair.key.rename(settings / "tls.key")
        one = {"name": "all", "roles": ["push", "follow", "read"], "models": ["*"]}
        text = authority_text([one | {"tokens": [token_hash(self.token)]}])
        for name, content in (("authority.toml", text), ("token", self.token)):
            (settings / name).touch(mode=0o600)
            (settings / name).write_text(content)
        save_file(_weights(1), self.folder / "model.safetensors")

    def typed(self, line: str) -> list[str]:
        """Return a line of the page, with the places of this machine."""
        for place, here in self.places.items():
            line = line.replace(place, here)
        program, *words = shlex.split(line)
        return [str(_BIN / program), *words]

    def printed(self, line: str) -> str:
        """Type a command about the fleet on the host of the server `f`; it must end well."""
        variables = {"WEIGHTSYNC_ADDRESS": f"unix:{self.folder}/f/server.sock"}
        return subprocess.run(
            self.typed(line),
            env=os.environ | variables,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        ).stdout

    @contextlib.contextmanager
    def running(
        self, name: str, line: str, variables: Mapping[str, str] | None = None
    ) -> Iterator[Client]:
        """Type a command that starts a server, and wait until it serves what it is there for."""
        home = self.folder / name
        home.mkdir()
        command = self.typed(line)
        environment = {
            **os.environ,
            **self._bucket.environment(),
            "WEIGHTSYNC_RUN_DIR": str(home),
            "WEIGHTSYNC_STATE_DIR": str(home / "state"),
            "WEIGHTSYNC_LISTEN": f"unix:{home}/server.sock",
            "WEIGHTSYNC_METRICS": "",
            "WEIGHTSYNC_MEMORY_BYTES": "64000000",
            "WEIGHTSYNC_FETCHERS": "1",
            **(variables or {}),
        }
        if "--engine" not in command:
            environment["WEIGHTSYNC_ENGINE"] = "memory"
            environment["WEIGHTSYNC_MODEL"] = str(self.folder / "model.safetensors")
        with (home / "log").open("wb") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            with self._client(home, command) as client:
                if "--engine" in command:
                    until(lambda: _answers(client, process), f"it answers: {line}", _START_S)
                else:
                    wait_serving(process, client, _START_S)
                yield client
        finally:
            process.kill()
            process.wait()

    def _client(self, home: Path, command: list[str]) -> Client:
        if "--listen" in command:
            access = Access(token=self.token, tls_ca=self.authority.ca)
            return Client(self.places[_HOST], access=access)
        return Client(f"unix:{home}/server.sock")


def _answers(client: Client, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None
    try:
        return bool(client.status().models)
    except ClientError:
        return False


def _announced(client: Client) -> int:
    (member,) = client.fleet_status().members
    return member.live_version


@pytest.fixture(scope="module")
def bucket(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectServer]:
    with moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture
def site(bucket: ObjectServer) -> Iterator[Site]:
    with tempfile.TemporaryDirectory(prefix="wsp", dir="/tmp") as name:
        yield Site(Path(name), bucket)


@pytest.mark.parametrize(("origin", "follower"), _PAIRS, ids=["grpcs", "s3", "file"])
def test_a_typed_origin_and_its_typed_follower(site: Site, origin: str, follower: str) -> None:
    trusted = {"WEIGHTSYNC_FOLLOW_CA": str(site.authority.ca)} if "grpcs://" in follower else {}
    with site.running("o", origin) as trainer, site.running("f", follower, trusted) as host:
        pushed = trainer.push(_weights(2))

        def staged() -> bool:
            return any(
                one.commit_time is not None
                and (one.version, one.content_digest, one.residency)
                == (pushed.version, pushed.content_digest, Residency.STAGED)
                for one in host.versions()
            )

        until(staged, "the follower has staged what was pushed")
        host.apply(pushed.version)
        assert host.verify().version == pushed.version


def test_the_fleet_commands_as_typed(site: Site, etcd: str) -> None:
    (member,) = [line for line in _SERVERS if "--fleet" in line]
    typed = commands("weightsync")
    calls = [line.split()[2] for line in typed]
    assert calls == ["apply", "status", "members", "abort", "rollback", "apply"]
    client = site.authority.sign("host7")
    with tempfile.TemporaryDirectory(prefix="wse", dir="/tmp") as folder:
        cluster = ProtectedEtcd(etcd, Path(folder), site.authority, client)
        try:
            site.places[_ETCD] = ",".join(cluster.addresses)
            secured = {
                "WEIGHTSYNC_FLEET_CA": str(site.authority.ca),
                "WEIGHTSYNC_FLEET_CERT": str(client.certificate),
                "WEIGHTSYNC_FLEET_KEY": str(client.key),
                "WEIGHTSYNC_FLEET_MEMBER": "host7",
            }
            with (
                site.running("o", _ORIGINS[1]) as trainer,
                site.running("f", member, secured) as host,
            ):
                # The bucket has versions of another origin.
                trainer.acquire_epoch()
                before = trainer.push(_weights(2), version=40).version
                host.fleet_apply(before)
                version = trainer.push(_weights(3), version=41).version
                printed = []
                for line in typed:
                    if line.endswith("members"):
                        # It tells the register what it holds after it has taken it.
                        until(lambda: _announced(host) == version, "the member says so")
                    printed.append(site.printed(line))
        finally:
            cluster.close()
    applied, status, members, aborted, rolled_back, accepted = printed
    assert "barrier: COMMIT, version 41" in applied
    assert f"version {version} is decided" in status
    assert members.startswith(f"host7: serving, version {version} ")
    assert aborted.startswith("no apply of the fleet is running")
    assert f"COMMIT, version {before}" in rolled_back
    assert f"COMMIT, version {version}" in accepted
