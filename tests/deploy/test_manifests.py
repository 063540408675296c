"""What the systemd units and the Kubernetes manifest promise: vLLM stays behind us."""

from __future__ import annotations

import configparser
import re
import shlex
import stat
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from pydantic_settings import CliApp

from tests.deploy.compose_file import ROOT
from weightsync.wire.grpc_channels import is_private
from weightsync_server.auth import RULES, Role
from weightsync_server.flags import Flags

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

UNITS = ROOT / "deploy/systemd"
#: They open paths that change weights for anybody, or unpickle what anybody sends.
NEVER = {"VLLM_SERVER_DEV_MODE", "VLLM_ALLOW_INSECURE_SERIALIZATION"}


@pytest.fixture(scope="module")
def objects() -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes/base/sidecar.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


@pytest.fixture(scope="module")
def pod(objects: dict[tuple[str, str], dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = objects["Deployment", "vllm"]["spec"]["template"]
    return found


@pytest.fixture(scope="module")
def containers(pod: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in pod["spec"]["containers"]}


def _unit(name: str, section: str = "Service") -> configparser.SectionProxy:
    unit = configparser.ConfigParser(strict=False, interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]  # keys are case-sensitive
    unit.read(UNITS / name)
    return unit[section]


def _mounts(container: dict[str, Any]) -> dict[str, str]:
    return {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}


# Kubernetes


def test_the_server_starts_with_the_arguments_of_the_manifest(
    containers: dict[str, dict[str, Any]],
) -> None:
    settings = CliApp.run(Flags, cli_args=containers["weightsync-server"]["args"]).tree
    listeners = settings.listeners
    for endpoint in listeners.endpoints:
        if not is_private(endpoint.address):
            assert listeners.tls_cert
            assert listeners.authority
    # Whom the NetworkPolicy lets in.
    assert settings.metrics_open
    # Everything else that its container offers to vLLM's is for reading.
    assert [one.role for one in listeners.endpoints if is_private(one.address)] == [Role.READ]
    for path in (listeners.tls_cert, listeners.tls_key, listeners.authority):
        assert path is not None
        mounted = _mounts(containers["weightsync-server"]).values()
        assert str(path.parent) in mounted


def test_the_two_share_sockets_and_a_group_and_nothing_else(
    pod: dict[str, Any], containers: dict[str, dict[str, Any]]
) -> None:
    server, vllm = containers["weightsync-server"], containers["vllm"]
    assert set(_mounts(server)) & set(_mounts(vllm)) == {"sockets"}
    security = pod["spec"]["securityContext"]
    assert security["runAsNonRoot"] is True
    assert security["runAsGroup"] == security["fsGroup"] == 10050
    uids = [one["securityContext"]["runAsUser"] for one in (server, vllm)]
    assert len({0, *uids}) == 3
    for one in (server, vllm):
        assert one["securityContext"]["allowPrivilegeEscalation"] is False
        assert one["securityContext"]["readOnlyRootFilesystem"] is True
        assert one["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for key in ("hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"):
        assert key not in pod["spec"]
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_a_full_store_takes_no_traffic_from_vllm(containers: dict[str, dict[str, Any]]) -> None:
    # A pod is ready when all its containers are.
    probes = {name: one["readinessProbe"]["exec"]["command"] for name, one in containers.items()}
    status = ["weightsync", "status", "--exit-code"]
    assert probes == {"weightsync-server": status, "vllm": [*status, "--service", "serving"]}


def test_a_server_that_ends_by_itself_is_started_again(pod: dict[str, Any]) -> None:
    # The default of a Deployment, and the only value that it may have.
    assert pod["spec"].get("restartPolicy", "Always") == "Always"
    service = _unit("weightsync-server.service")
    assert service["Restart"] == "on-failure"
    for setting in ("RestartPreventExitStatus", "SuccessExitStatus"):
        assert setting not in service
    # However often it ends: systemd gives up after five starts within ten seconds otherwise.
    assert _unit("weightsync-server.service", "Unit")["StartLimitIntervalSec"] == "0"


def test_secrets_are_closed_to_others(pod: dict[str, Any]) -> None:
    secrets = [volume["secret"] for volume in pod["spec"]["volumes"] if "secret" in volume]
    assert len(secrets) == 2
    # YAML 1.1, which Kubernetes reads, takes 0440 for an octal number.
    assert {secret["defaultMode"] for secret in secrets} == {0o440}
    mounted = {volume["name"] for volume in pod["spec"]["volumes"] if "secret" in volume}
    (vllm,) = [one for one in pod["spec"]["containers"] if one["name"] == "vllm"]
    assert not mounted & set(_mounts(vllm))


def test_vllm_has_no_development_paths(containers: dict[str, dict[str, Any]]) -> None:
    variables = {entry["name"]: entry for entry in containers["vllm"]["env"]}
    assert not NEVER & set(variables)
    assert "valueFrom" in variables["VLLM_API_KEY"]
    assert variables["VLLM_PLUGINS"]["value"] == "weightsync"
    assert variables["WEIGHTSYNC_ADDRESS"]["value"] == "unix:/run/weightsync/read.sock"


def test_the_network_policy_names_every_port_and_who_may_come(
    objects: dict[tuple[str, str], dict[str, Any]],
    pod: dict[str, Any],
    containers: dict[str, dict[str, Any]],
) -> None:
    policy = objects["NetworkPolicy", "vllm"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
    assert policy["egress"] == []
    ports = [port["port"] for rule in policy["ingress"] for port in rule["ports"]]
    offered = [p["containerPort"] for one in containers.values() for p in one["ports"]]
    assert sorted(ports) == sorted(offered)
    assert all(rule["from"] for rule in policy["ingress"])


def test_pushes_do_not_wait_for_vllm(objects: dict[tuple[str, str], dict[str, Any]]) -> None:
    # The pod is ready when vLLM serves, which may need a push first.
    assert objects["Service", "weightsync"]["spec"]["publishNotReadyAddresses"] is True
    assert "publishNotReadyAddresses" not in objects["Service", "vllm"]["spec"]


# systemd


def test_systemd_accepts_the_units(program: Callable[[str, str], str], tmp_path: Path) -> None:
    for unit in UNITS.glob("*.service"):
        # What they start is not installed here.
        text = re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text())
        (tmp_path / unit.name).write_text(text)
    verify = [program("systemd-analyze", "systemd"), "verify", "--man=no"]
    ran = subprocess.run(
        [*verify, *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stderr) == (0, "")


def test_a_group_for_each_role_may_enter_its_folder(
    program: Callable[[str, str], str], tmp_path: Path
) -> None:
    (tmp_path / "etc").mkdir()
    for tool, flags, name in (
        ("systemd-sysusers", [], "weightsync.sysusers.conf"),
        ("systemd-tmpfiles", ["--create"], "weightsync.tmpfiles.conf"),
    ):
        command = [program(tool, "systemd"), f"--root={tmp_path}", *flags, str(UNITS / name)]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ran.returncode == 0, ran.stderr
    groups = {
        line.split(":")[0]: int(line.split(":")[2])
        for line in (tmp_path / "etc/group").read_text().splitlines()
    }
    users = {
        line.split(":")[0]: line.split(":")[2:4]
        for line in (tmp_path / "etc/passwd").read_text().splitlines()
    }
    assert users["weightsync"][0] != users["vllm"][0]
    assert users["weightsync"][1] == users["vllm"][1] == str(groups["weightsync"])
    for role in ("push", "apply", "read"):
        entry = (tmp_path / f"run/weightsync-{role}").stat()
        assert stat.S_IMODE(entry.st_mode) == 0o2750
        assert entry.st_uid == int(users["weightsync"][0])
        assert entry.st_gid == groups[f"weightsync-{role}"]


def test_the_unit_of_the_server_gives_each_socket_its_role() -> None:
    service = _unit("weightsync-server.service")
    variable, lending = shlex.split(service["Environment"])
    # Whoever may push here may also write into the memory of the push.
    assert lending == "WEIGHTSYNC_SAME_HOST_SOCKET=/run/weightsync-push/trainers.sock"
    name, _, value = variable.partition("=")
    assert name == "WEIGHTSYNC_LISTEN"
    endpoints = CliApp.run(Flags, cli_args=["--listen", value]).tree.listeners.endpoints
    assert [one.role for one in endpoints] == [Role.PUSH, Role.APPLY, Role.READ, Role.ADMIN]
    writable = service["ReadWritePaths"].split()
    for endpoint in endpoints[:3]:
        folder = f"/run/weightsync-{endpoint.role}"
        assert endpoint.address == f"unix:{folder}/weightsync.sock"
        assert folder in writable
    assert service["StateDirectoryMode"] == "0700"
    assert endpoints[3].address.startswith(f"unix:/var/lib/{service['StateDirectory']}/")
    assert service["LimitCORE"] == "0"


def test_the_unit_of_vllm_keeps_it_to_this_host() -> None:
    service, server = _unit("vllm.service"), _unit("weightsync-server.service")
    words = shlex.split(service["ExecStart"])
    assert words[words.index("--host") + 1] == "127.0.0.1"
    assert set(service["UnsetEnvironment"].split()) == NEVER
    assert (service["IPAddressDeny"], service["IPAddressAllow"]) == ("any", "localhost")
    assert service["User"] != server["User"]
    assert service["Group"] == server["Group"]
    hidden = {path.removeprefix("-") for path in service["InaccessiblePaths"].split()}
    assert {"/var/lib/weightsync", "/run/weightsync-push", "/run/weightsync-apply"} <= hidden


def test_the_table_of_roles_is_the_one_in_the_code() -> None:
    page = (ROOT / "docs/how-to/tls-and-tokens.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| ([a-z, ]+) \|", page, re.MULTILINE)
    code = {
        path.rpartition("/")[2]: ", ".join(sorted(role for role in rule.roles if role != "admin"))
        for path, rule in RULES.items()
        # Tests alone have it; the page says so in a sentence.
        if not path.startswith("/weightsync.debug.")
    }
    assert dict(rows) == {name: roles or "admin" for name, roles in code.items()}
