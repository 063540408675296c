"""What docker-compose.fleet.yml promises, read without any engine."""

from __future__ import annotations

import json
import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from pydantic_settings import CliApp

from tests.deploy.compose_file import ROOT, load
from weightsync_server.auth import Endpoint, Role
from weightsync_server.flags import Flags
from weightsync_server.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.deploy.compose_file import Service

FILE = ROOT / "docker-compose.fleet.yml"
#: Where Debian's docker-compose keeps the schema.
SCHEMA = Path("/usr/lib/python3/dist-packages/compose/config/compose_spec.json")
SECRETS = ("MINIO_ROOT_PASSWORD", "ORIGIN_SECRET", "FOLLOWER_SECRET")
SERVERS = ("origin", "follower-1", "follower-2")
PAIRS = (("follower-1", "vllm-1"), ("follower-2", "vllm-2"))


@pytest.fixture(scope="module")
def fleet(docker_compose: str) -> dict[str, Service]:
    secrets = {name: f"of-{name.lower()}" for name in SECRETS}
    return load(docker_compose, FILE.name, variables={"MODEL_DIR": "/model", **secrets})


@pytest.fixture(scope="module")
def settings(fleet: dict[str, Service]) -> dict[str, Settings]:
    """What each server makes of its flags."""
    return {name: CliApp.run(Flags, cli_args=fleet[name].argv[1:]).tree for name in SERVERS}


def test_it_obeys_the_compose_schema(program: Callable[[str, str], str]) -> None:
    program("docker-compose", "docker-compose")
    schema = json.loads(SCHEMA.read_text())
    jsonschema.Draft201909Validator(schema).validate(yaml.safe_load(FILE.read_text()))


@pytest.mark.parametrize("missing", SECRETS)
def test_it_has_no_secret_of_its_own(docker_compose: str, missing: str) -> None:
    given = {name: "x" for name in SECRETS if name != missing}
    command = [docker_compose, "-f", str(FILE), "config", "-q"]
    ran = subprocess.run(command, env=given, capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "see the head of docker-compose.fleet.yml" in ran.stderr


def test_each_secret_is_where_it_is_needed(fleet: dict[str, Service]) -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for service in fleet.values():
        for value in service.environment.values():
            users[value].add(service.name)
    assert users["of-minio_root_password"] == {"minio", "bucket"}
    assert users["of-origin_secret"] == {"bucket", "origin"}
    assert users["of-follower_secret"] == {"bucket", "follower-1", "follower-2"}


def test_nobody_is_root_or_has_more_than_it_needs(fleet: dict[str, Service]) -> None:
    for service in fleet.values():
        assert service.uid, service.name
        assert service.raw["cap_drop"] == ["ALL"]
        assert service.raw["security_opt"] == ["no-new-privileges:true"]
        assert service.read_only or service.name.startswith("vllm")
        for key in ("ipc", "pid", "network_mode", "volumes_from", "privileged"):
            assert key not in service.raw, (service.name, key)
        for port in service.raw.get("ports", []):
            assert port.startswith("127.0.0.1:"), (service.name, port)


def test_vllm_reaches_nothing_but_its_follower(fleet: dict[str, Service]) -> None:
    document = yaml.safe_load(FILE.read_text())
    assert document["networks"]["backend"] == {"internal": True}
    for name, service in fleet.items():
        network = "inference" if name.startswith("vllm") else "backend"
        assert list(service.raw["networks"]) == [network]
    users: dict[str, set[str]] = defaultdict(set)
    for service in fleet.values():
        for mount in service.mounts:
            users[mount.source].add(service.name)
    del users["/model"]
    shared = {source: names for source, names in users.items() if len(names) > 1}
    assert shared == {"sockets-1": set(PAIRS[0]), "sockets-2": set(PAIRS[1])}
    for follower, vllm in PAIRS:
        endpoints = [
            Endpoint.parse(flag.partition("=")[2])
            for flag in fleet[follower].argv
            if flag.startswith("--listen=unix:/run/weightsync/")
        ]
        (one,) = endpoints
        assert one.role is Role.READ
        assert one.address == fleet[vllm].environment["WEIGHTSYNC_ADDRESS"]


def test_vllm_is_that_of_the_other_file(
    fleet: dict[str, Service], services: dict[str, Service]
) -> None:
    wanted = services["vllm"]
    for _, name in PAIRS:
        vllm = fleet[name]
        for key in ("argv", "environment", "uid", "gid", "shm_bytes", "healthcheck", "read_only"):
            assert getattr(vllm, key) == getattr(wanted, key), key
        for key in ("build", "image", "init", "stop_grace_period", "restart"):
            assert vllm.raw[key] == wanted.raw[key], key
        assert {one.target for one in vllm.mounts} == {one.target for one in wanted.mounts}
    for name in SERVERS:
        assert fleet[name].raw["build"] == services["weightsync-server"].raw["build"]
        assert fleet[name].uid == services["weightsync-server"].uid


def test_followers_are_members_of_one_fleet(
    fleet: dict[str, Service], settings: dict[str, Settings]
) -> None:
    origin, *followers = settings.values()
    assert origin.engines.given == ["none"]
    assert {one.replica.url for one in followers} == {origin.paths.store}
    assert {one.name for one in settings.values()} == {origin.name}
    assert [one.fleet.member for one in followers] == ["follower-1", "follower-2"]
    ((name, register),) = {(one.fleet.fleet, one.fleet.register) for one in followers}
    assert name
    place = register.removeprefix("etcd://").partition("/")[0]
    assert f"--advertise-client-urls=http://{place}" in fleet["etcd"].argv
    assert place.partition(":")[0] in fleet
    for one in SERVERS:
        longest_s = settings[one].drain_timeout_s + settings[one].stop_timeout_s
        assert fleet[one].stop_grace_s > longest_s
        assert fleet[one].environment["AWS_ENDPOINT_URL"] == "http://minio:9000"
    assert "--address=:9000" in fleet["minio"].argv


def test_who_waits_for_whom(fleet: dict[str, Service]) -> None:
    for service in fleet.values():
        assert service.healthcheck or service.name == "bucket", service.name
        for other, how in service.raw.get("depends_on", {}).items():
            once = other == "bucket"
            condition = "service_completed_successfully" if once else "service_healthy"
            assert how == {"condition": condition}
    assert set(fleet["follower-1"].raw["depends_on"]) == {"etcd", "origin"}
    assert set(fleet["origin"].raw["depends_on"]) == {"bucket"}
    # vLLM is healthy once its follower has reconciled it, so no follower may wait for vLLM.
    for follower, vllm in PAIRS:
        assert set(fleet[vllm].raw["depends_on"]) == {follower}
    for name in ("etcd", "minio", *SERVERS):
        assert fleet[name].raw["restart"] == "unless-stopped"


def test_data_folders_belong_to_who_writes_there(fleet: dict[str, Service]) -> None:
    text = (ROOT / "deploy/docker/Dockerfile.fleet").read_text()
    for name in ("etcd", "minio"):
        service = fleet[name]
        (data,) = (mount.target for mount in service.mounts)
        stage = text.partition(f" AS {name}\n")[2].partition("\nFROM ")[0]
        owner = f"{service.uid}:{service.gid}"
        assert (
            f"COPY --from=folders --chown={owner} /{name} /\n" in stage
            and f"install -d -m 0700 /{name}{data}\n" in text
        ) or f"install -d -m 0700 -o {service.uid} -g {service.gid} {data}\n" in stage
        assert f"USER {owner}\n" in stage
        assert any(word.endswith(data) for word in service.argv)
        assert service.raw["build"]["target"] == name
    assert fleet["bucket"].raw["build"] == fleet["minio"].raw["build"]


def test_accounts_have_the_rights_that_the_page_gives(fleet: dict[str, Service]) -> None:
    page = (ROOT / "docs/how-to/bucket-and-etcd-rights.md").read_text()
    blocks = re.findall(r"```json\n(.*?)```", page, re.DOTALL)
    wanted = dict(zip(("follower", "origin"), map(json.loads, blocks[-2:]), strict=True))
    for account, policy in wanted.items():
        found = json.loads((ROOT / f"deploy/minio/{account}.json").read_text())
        assert _statements(found) == _statements(policy)
    (script,) = (mount for mount in fleet["bucket"].mounts if mount.target == "/minio")
    text = (Path(script.source) / "bucket.sh").read_text()
    assert fleet["bucket"].argv == ["sh", "/minio/bucket.sh"]
    for name in SERVERS:
        account = fleet[name].environment["AWS_ACCESS_KEY_ID"]
        assert account == name.partition("-")[0]
        assert f'mc admin user add root {account} "${account.upper()}_SECRET"' in text
    assert subprocess.run(["sh", "-n", f"{script.source}/bucket.sh"], check=False).returncode == 0


def _statements(policy: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a policy's statements, each value a list; IAM takes one without, too."""
    return [
        {key: [value] if isinstance(value, str) else value for key, value in statement.items()}
        for statement in policy["Statement"]
    ]
