"""The Kubernetes overlays as kustomize builds them: valid objects that fit together."""

from __future__ import annotations

import copy
import json
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from pydantic_settings import CliApp

from tests.deploy.compose_file import ROOT
from weightsync_server.flags import Flags

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightsync_server.settings import Settings

KUBERNETES = ROOT / "deploy/kubernetes"
OVERLAYS = ("sidecar", "fleet")
#: Of Kubernetes; the first and the last whose schemas are installed.
RELEASES = ("1.25", "1.37")
#: First release of kustomize that builds what the overlays say.
_KUSTOMIZE = 5

Object = dict[str, Any]


@dataclass(frozen=True)
class Overlay:
    objects: dict[tuple[str, str], Object]

    def of(self, *kinds: str) -> Iterator[tuple[str, Object]]:
        """Yield name and object of each that has one of these kinds."""
        yield from ((name, one) for (kind, name), one in self.objects.items() if kind in kinds)

    def pods(self) -> dict[str, Object]:
        """Return the template of each workload's pods by its name."""
        return {name: one["spec"]["template"] for name, one in self.of("Deployment", "StatefulSet")}

    def servers(self) -> dict[str, Settings]:
        """Return the settings of each workload's weightsync-server by the workload's name."""
        return {
            name: CliApp.run(Flags, cli_args=_container(pod, "weightsync-server")["args"]).tree
            for name, pod in self.pods().items()
        }


def _container(pod: Object, name: str) -> Object:
    (found,) = [one for one in pod["spec"]["containers"] if one["name"] == name]
    return dict(found)


def _selects(selector: Object, pod: Object) -> bool:
    return bool(selector["matchLabels"].items() <= pod["metadata"]["labels"].items())


def _ports(pod: Object) -> dict[str, int]:
    containers = pod["spec"]["containers"]
    return {port["name"]: port["containerPort"] for one in containers for port in one["ports"]}


@pytest.fixture(scope="module")
def kubectl(program: Callable[[str, str], str]) -> str:
    path = program("kubectl", "kubernetes-client")
    version = json.loads(_run(path, "version", "--client", "-o", "json"))
    kustomize = version.get("kustomizeVersion", "v0")
    if int(kustomize.removeprefix("v").partition(".")[0]) < _KUSTOMIZE:
        pytest.skip(f"kubectl has kustomize {kustomize}; needs {_KUSTOMIZE} or newer")
    return path


def _run(*command: str | Path) -> str:
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    # A warning says what the next release refuses.
    assert (ran.returncode, ran.stderr) == (0, ""), ran.stdout
    return ran.stdout


@pytest.fixture(scope="module")
def overlays(kubectl: str) -> dict[str, Overlay]:
    built = {}
    for name in OVERLAYS:
        documents = yaml.safe_load_all(_run(kubectl, "kustomize", KUBERNETES / "overlays" / name))
        built[name] = Overlay({(one["kind"], one["metadata"]["name"]): one for one in documents})
    return built


@pytest.fixture(params=OVERLAYS)
def overlay(request: pytest.FixtureRequest, overlays: dict[str, Overlay]) -> Overlay:
    return overlays[request.param]


@pytest.mark.parametrize("release", RELEASES)
def test_kubernetes_knows_every_field(overlay: Overlay, release: str) -> None:
    assert len(overlay.objects) >= 5
    for (kind, _), one in overlay.objects.items():
        # No object of Kubernetes itself: the operator's.
        if kind != "PodMonitor":
            kubernetes_validate.validate(one, release, strict=True)


def test_a_misspelt_field_would_be_noticed(overlays: dict[str, Overlay]) -> None:
    wrong = copy.deepcopy(overlays["fleet"].objects["StatefulSet", "vllm"])
    wrong["spec"]["template"]["spec"]["containers"][0]["readinessprobe"] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match="readinessprobe"):
        kubernetes_validate.validate(wrong, RELEASES[-1], strict=True)


def test_all_that_a_container_mounts_is_there(overlay: Overlay) -> None:
    for name, one in overlay.of("Deployment", "StatefulSet"):
        pod = one["spec"]["template"]["spec"]
        claims = one["spec"].get("volumeClaimTemplates", [])
        volumes = [volume["name"] for volume in pod["volumes"]]
        volumes += [claim["metadata"]["name"] for claim in claims]
        assert len(volumes) == len(set(volumes)), name
        mounted = {m["name"] for c in pod["containers"] for m in c["volumeMounts"]}
        assert mounted == set(volumes), name


def test_every_server_starts_with_its_arguments(overlay: Overlay) -> None:
    for name, settings in overlay.servers().items():
        mounts = _container(overlay.pods()[name], "weightsync-server")["volumeMounts"]
        folders = {mount["mountPath"] for mount in mounts}
        listeners, fleet = settings.listeners, settings.fleet
        files = [listeners.tls_cert, listeners.tls_key, listeners.authority]
        assert all(files)
        files += [fleet.ca, fleet.certificate, fleet.key]
        for path in files:
            assert path is None or str(path.parent) in folders, (name, path)
        assert settings.metrics_open


def test_a_service_reaches_a_port_of_its_pods(overlay: Overlay) -> None:
    services = dict(overlay.of("Service"))
    for name, service in services.items():
        chosen = [
            pod
            for pod in overlay.pods().values()
            if _selects({"matchLabels": service["spec"]["selector"]}, pod)
        ]
        assert len(chosen) == 1, name
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= set(_ports(chosen[0]))
    for name, one in overlay.of("StatefulSet"):
        assert services[one["spec"]["serviceName"]]["spec"]["clusterIP"] == "None", name


def test_a_policy_names_every_port_of_each_pod(overlay: Overlay) -> None:
    policies = [one["spec"] for _, one in overlay.of("NetworkPolicy")]
    for name, pod in overlay.pods().items():
        (policy,) = [one for one in policies if _selects(one["podSelector"], pod)]
        assert set(policy["policyTypes"]) == {"Ingress", "Egress"}
        assert all(rule["from"] for rule in policy["ingress"]), name
        let_in = {port["port"] for rule in policy["ingress"] for port in rule["ports"]}
        assert let_in == set(_ports(pod).values()), name


def test_prometheus_finds_the_metrics_of_each_pod(
    overlay: Overlay, promtool: str, tmp_path: Path
) -> None:
    ((_, monitor),) = overlay.of("PodMonitor")
    endpoints = {one["port"]: one for one in monitor["spec"]["podMetricsEndpoints"]}
    policies = [one["spec"] for _, one in overlay.of("NetworkPolicy")]
    for name, pod in overlay.pods().items():
        assert _selects(monitor["spec"]["selector"], pod), name
        (policy,) = [one for one in policies if _selects(one["podSelector"], pod)]
        (rule,) = [r for r in policy["ingress"] if "namespaceSelector" in r["from"][0]]
        scraped = {port for each, port in _ports(pod).items() if each in endpoints}
        assert {port["port"] for port in rule["ports"]} == scraped, name
    jobs = [
        {"job_name": port, "relabel_configs": [_plain(rule) for rule in one["relabelings"]]}
        for port, one in endpoints.items()
    ]
    file = tmp_path / "prometheus.yml"
    file.write_text(yaml.safe_dump({"scrape_configs": jobs}))
    _run(promtool, "check", "config", file)


def _plain(relabeling: Object) -> Object:
    """Return a rule of a PodMonitor as Prometheus' own file has it."""
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    return {names.get(key, key): value for key, value in relabeling.items()}


def test_jobs_are_those_of_the_alerts(overlay: Overlay) -> None:
    plain = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    ((_, monitor),) = overlay.of("PodMonitor")
    jobs, labels = [], []
    for endpoint in monitor["spec"]["podMetricsEndpoints"]:
        rules = {rule["targetLabel"]: rule for rule in endpoint["relabelings"]}
        jobs.append(rules.pop("job")["replacement"])
        labels.append(set(rules))
    assert jobs == [one["job_name"] for one in plain["scrape_configs"]]
    assert labels == [set(one["static_configs"][0]["labels"]) for one in plain["scrape_configs"]]


def test_members_meet_where_the_origin_keeps_versions(overlays: dict[str, Overlay]) -> None:
    servers = overlays["fleet"].servers()
    origin, member = servers["weightsync-origin"], servers["vllm"]
    assert origin.engines.given == ["none"]
    assert member.replica.url == origin.paths.store
    assert (member.fleet.fleet, member.fleet.register) == (
        origin.fleet.fleet,
        origin.fleet.register,
    )
    assert member.fleet.fleet
    # A host name, which is the pod's: another for each.
    arguments = _container(overlays["fleet"].pods()["vllm"], "weightsync-server")["args"]
    assert not [one for one in arguments if one.startswith("--fleet-member")]
    assert overlays["fleet"].objects["StatefulSet", "vllm"]["spec"]["replicas"] > 1


def test_a_fleet_reaches_names_etcd_and_the_bucket_and_a_sidecar_nothing(
    overlays: dict[str, Overlay],
) -> None:
    for _, policy in overlays["sidecar"].of("NetworkPolicy"):
        assert policy["spec"]["egress"] == []
    register = overlays["fleet"].servers()["vllm"].fleet.register
    hosts = urlsplit(register).netloc.split(",")
    etcd = {int(host.rpartition(":")[2]) for host in hosts}
    for name, policy in overlays["fleet"].of("NetworkPolicy"):
        egress = policy["spec"]["egress"]
        assert all(rule["to"] for rule in egress), name
        assert {p["port"] for rule in egress for p in rule["ports"]} == {53, 443, *etcd}, name


def test_a_member_may_only_read_the_bucket(overlays: dict[str, Overlay]) -> None:
    secrets = {
        name: [source["secretRef"]["name"] for source in server["envFrom"]]
        for name, pod in overlays["fleet"].pods().items()
        for server in [_container(pod, "weightsync-server")]
    }
    assert secrets == {
        "vllm": ["weightsync-bucket-read"],
        "weightsync-origin": ["weightsync-bucket-write"],
    }
    # What parses requests of strangers has neither.
    assert "envFrom" not in _container(overlays["fleet"].pods()["vllm"], "vllm")
