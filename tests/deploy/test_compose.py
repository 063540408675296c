"""What the compose file, the images and the unit promise, read without any engine."""

from __future__ import annotations

import configparser
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jsonschema
import pytest
import yaml
from pydantic_settings import CliApp

from tests.deploy.compose_file import ROOT, Service, folders_of_images, load, seconds
from weightsync import host_dirs
from weightsync_server.auth import Endpoint, Role
from weightsync_server.flags import Flags

if TYPE_CHECKING:
    from collections.abc import Callable

FILES = ("docker-compose.yml", "docker-compose.gpu.yml")
#: Where Debian's docker-compose keeps the schema.
SCHEMA = "/usr/lib/python3/dist-packages/compose/config/compose_spec.json"


@pytest.fixture(scope="module")
def drain_s() -> float:
    return float(Flags.model_fields["drain_timeout_s"].default)


@pytest.fixture(scope="module")
def stop_s(drain_s: float) -> float:
    return drain_s + float(Flags.model_fields["stop_timeout_s"].default)


@pytest.mark.parametrize("file", FILES)
def test_files_obey_the_compose_schema(file: str, program: Callable[[str, str], str]) -> None:
    program("docker-compose", "docker-compose")
    schema = json.loads(Path(SCHEMA).read_text())
    document = yaml.safe_load((ROOT / file).read_text())
    jsonschema.Draft201909Validator(schema).validate(document)


@pytest.mark.parametrize("files", [FILES[:1], FILES], ids=["cpu", "gpu"])
def test_docker_compose_accepts_the_files(docker_compose: str, files: tuple[str, ...]) -> None:
    named = [part for file in files for part in ("-f", str(ROOT / file))]
    command = [docker_compose, *named, "config", "-q"]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")


def test_only_loopback_is_published(services: dict[str, Service]) -> None:
    for service in services.values():
        for port in service.raw.get("ports", []):
            assert port.startswith("127.0.0.1:"), (service.name, port)


def test_nobody_is_root(services: dict[str, Service]) -> None:
    uids = [service.uid for service in services.values()]
    assert 0 not in uids
    assert len(set(uids)) == len(uids)
    assert services["vllm"].gid == services["weightsync-server"].gid
    for service in services.values():
        assert service.raw["cap_drop"] == ["ALL"]
        assert service.raw["security_opt"] == ["no-new-privileges:true"]


def test_only_the_sockets_are_shared(services: dict[str, Service]) -> None:
    users: dict[str, set[str]] = defaultdict(set)
    for service in services.values():
        for mount in service.mounts:
            users[mount.source].add(service.name)
        for key in ("ipc", "pid", "network_mode", "volumes_from", "privileged"):
            assert key not in service.raw, (service.name, key)
    shared = {source: names for source, names in users.items() if len(names) > 1}
    assert shared == {"sockets": {"vllm", "weightsync-server"}}
    assert users["state"] == users["clients"] == {"weightsync-server"}


def test_vllm_may_look_and_no_more(services: dict[str, Service]) -> None:
    # What it can open in the shared folder is a socket for reading; the other is not mounted.
    flags = [flag for flag in services["weightsync-server"].argv if flag.startswith("--listen=")]
    endpoints = [Endpoint.parse(flag.partition("=")[2]) for flag in flags]
    shared = [one for one in endpoints if one.address.startswith("unix:/run/weightsync/")]
    assert [(one.address, one.role) for one in shared] == [
        (services["vllm"].environment["WEIGHTSYNC_ADDRESS"], Role.READ)
    ]
    for service in services.values():
        assert not {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"} & set(
            service.environment
        )


def test_new_volumes_belong_to_who_uses_them(services: dict[str, Service]) -> None:
    folders = folders_of_images()
    for name in ("vllm", "weightsync-server"):
        service = services[name]
        for mount in service.mounts:
            if mount.named:
                mode, owner, group = folders[mount.target]
                assert group == service.gid
                assert mode & 0o007 == 0
                if mount.source != "sockets":
                    assert owner == service.uid
    # Files made there take its group, whoever makes them.
    assert folders["/run/weightsync"] == (0o2770, 0, services["vllm"].gid)


def test_images_run_as_the_users_of_the_compose_file(services: dict[str, Service]) -> None:
    text = (ROOT / "deploy/docker/Dockerfile").read_text()
    for name in ("vllm", "weightsync-server"):
        service = services[name]
        target = service.raw["build"]["target"]
        stage = text.partition(f" AS {target}\n")[2].partition("\nFROM ")[0]
        assert f"USER {service.uid}:{service.gid}\n" in stage
        assert f"ENTRYPOINT {json.dumps(service.raw['entrypoint'])}" in stage


def test_the_build_context_holds_what_the_wheel_needs(tmp_path: Path) -> None:
    rules = (ROOT / "deploy/docker/Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in rules
    for name in [rule[1:] for rule in rules if rule.startswith("!")]:
        if (ROOT / name).is_dir():
            skip = shutil.ignore_patterns("__pycache__")
            shutil.copytree(ROOT / name, tmp_path / name, ignore=skip)
        else:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / name)
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    assert list((tmp_path / "dist").glob("weightsync-*.whl"))


def test_health_decides_who_starts_when(services: dict[str, Service]) -> None:
    for service in services.values():
        assert service.healthcheck, service.name
        for other, how in service.raw.get("depends_on", {}).items():
            assert how == {"condition": "service_healthy"}
            assert services[other].healthcheck
    status = ["weightsync", "status", "--exit-code"]
    assert services["vllm"].healthcheck == [*status, "--service", "serving"]
    # Of the process alone: vLLM starts beside a store whose disk is full.
    assert services["weightsync-server"].healthcheck == status
    # vLLM is healthy once the server has reconciled it, so the server must not wait for vLLM.
    assert "depends_on" not in services["weightsync-server"].raw


def test_a_server_that_ends_by_itself_is_started_again(services: dict[str, Service]) -> None:
    assert services["weightsync-server"].raw["restart"] == "unless-stopped"


def test_the_server_gets_longer_to_stop_than_it_takes(
    services: dict[str, Service], drain_s: float, stop_s: float
) -> None:
    server = services["weightsync-server"]
    (flag,) = [flag for flag in server.argv if flag.startswith("--drain-timeout-s=")]
    assert float(flag.partition("=")[2]) == drain_s
    assert server.stop_grace_s > stop_s


def test_the_queues_of_vllm_fit_into_its_shared_memory(services: dict[str, Service]) -> None:
    assert services["vllm"].shm_bytes >= (160 + 240) << 20


def test_the_gpu_file_changes_only_vllm(docker_compose: str, services: dict[str, Service]) -> None:
    merged = load(docker_compose, *FILES, variables={"MODEL_DIR": "/model"})
    assert {name for name in merged if merged[name] != services[name]} == {"vllm"}
    vllm: dict[str, Any] = merged["vllm"].raw
    (device,) = vllm["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    assert "--enforce-eager" not in vllm["command"]
    assert set(merged["vllm"].mounts) == set(services["vllm"].mounts)
    assert merged["vllm"].healthcheck == services["vllm"].healthcheck


def test_grafana_finds_dashboard_and_datasource(services: dict[str, Service]) -> None:
    targets = {mount.target: mount.source for mount in services["grafana"].mounts}
    provisioning = Path(targets["/etc/grafana/provisioning"])
    (provider,) = yaml.safe_load((provisioning / "dashboards/weightsync.yml").read_text())[
        "providers"
    ]
    home = services["grafana"].environment["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert str(Path(home).parent) == provider["options"]["path"]
    assert Path(targets[home]) == ROOT / "deploy/grafana/weightsync.json"
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yml").read_text())[
        "datasources"
    ]
    assert source["url"] == "http://prometheus:9090"


def test_prometheus_scrapes_services_at_ports_they_listen_on(services: dict[str, Service]) -> None:
    jobs = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    (server,), (vllm,) = (job["static_configs"][0]["targets"] for job in jobs["scrape_configs"])
    name, _, port = server.partition(":")
    assert f"--metrics=0.0.0.0:{port}" in services[name].argv
    # Its flags are those of a server that starts.
    _, *flags = services[name].argv
    assert CliApp.run(Flags, cli_args=flags).tree.metrics_open
    name, _, port = vllm.partition(":")
    assert f"--port={port}" in services[name].argv


def test_the_systemd_unit_outlasts_the_stop(stop_s: float) -> None:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys are case-sensitive
    unit.read(ROOT / "deploy/systemd/weightsync-server.service")
    service = unit["Service"]
    assert seconds(f"{service['TimeoutStopSec']}s") > stop_s
    assert service["LimitMEMLOCK"] == "infinity"
    assert service["UMask"] == "0007"
    # Which the unit's user can write, and so gets by default.
    assert Path("/run", service["RuntimeDirectory"]) == host_dirs._SYSTEM_RUN
    assert Path("/var/lib", service["StateDirectory"]) == host_dirs._SYSTEM_STATE
