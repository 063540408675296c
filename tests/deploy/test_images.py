"""The Dockerfiles: what they name is there; and, with the long tests, built and run without Docker.

Buildah builds them on a base that mmdebstrap makes of Debian's packages, in place of the images of
a registry; Podman runs them as docker-compose.yml says, and a push is served through both.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.deploy.compose_file import ROOT, Service, folders_of_images, load
from tests.support.models import make_checkpoint
from tests.support.pip_options import folders_of_pip, pip_options
from weightsync_client.cli.cli_options import ExitCode

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_FOLDER = ROOT / "deploy/docker"
_COMPOSE = sorted(ROOT.glob("docker-compose*.yml"))
_FROM = re.compile(r"^FROM (\S+) AS (\S+)$", re.MULTILINE)
#: Of the names that the instructions after a FROM take things out of.
_OTHER_STAGE = re.compile(r"(?:--from=|,from=)([^,\s]+)")


def _builds() -> list[tuple[str, str, dict[str, str]]]:
    """Return file, service and build of each service that is built."""
    return [
        (path.name, name, service["build"])
        for path in _COMPOSE
        for name, service in yaml.safe_load(path.read_text())["services"].items()
        if "dockerfile" in service.get("build", {})
    ]


@pytest.mark.parametrize(("file", "service", "build"), _builds(), ids=str)
def test_a_service_is_built_from_a_stage_that_is_there(
    file: str, service: str, build: dict[str, str]
) -> None:
    del file, service
    text = (ROOT / build["context"] / build["dockerfile"]).read_text()
    assert build["target"] in [stage for _, stage in _FROM.findall(text)]


@pytest.mark.parametrize("name", ["Dockerfile", "Dockerfile.fleet"])
def test_a_stage_takes_what_is_there(name: str) -> None:
    text = (_FOLDER / name).read_text()
    (context,) = {
        build["context"]
        for *_, build in _builds()
        if (ROOT / build["context"] / build["dockerfile"]) == _FOLDER / name
    }
    head, *stages = re.split(r"^(?=FROM )", text, flags=re.MULTILINE)
    images = {f"${{{variable}}}" for variable in re.findall(r"^ARG (\w+)=\S+$", head, re.MULTILINE)}
    known: set[str] = set()
    for stage in stages:
        (found,) = _FROM.findall(stage)
        assert found[0] in images | known
        assert set(_OTHER_STAGE.findall(stage)) <= known
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", stage, re.MULTILINE):
            assert all((ROOT / context / source).exists() for source in sources.split())
        known.add(found[1])
    assert images == {image for image, _ in _FROM.findall(text)} - known


# Built and run.

#: Not those of Podman, which a machine may not give; enough for vLLM's threads.
_LIMITS = ("--ulimit=nofile=4096:4096", "--ulimit=nproc=4096:4096")
_START_S = 400


@dataclass(frozen=True)
class _Engine:
    """Buildah and Podman over a storage of their own."""

    storage: Path
    started: list[str] = field(default_factory=list)

    def _own(self, program: str) -> list[str]:
        return [program, "--root", f"{self.storage}/root", "--runroot", f"{self.storage}/run"]

    def __call__(self, program: str, *words: str) -> str:
        """Run one of the two, and return what it printed."""
        command = [*self._own(program), *words]
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode:
            pytest.fail(f"{program} {words[0]}: {ran.stdout[-2000:]}{ran.stderr[-2000:]}")
        return ran.stdout.strip()

    def says(self, container: str, *command: str) -> subprocess.CompletedProcess[str]:
        """Run a command in a container, which may fail."""
        return subprocess.run(
            [*self._own("podman"), "exec", container, *command],
            capture_output=True,
            text=True,
            check=False,
        )

    def end(self) -> None:
        """Remove all containers, volumes and images."""
        # The first one's network is the others'.
        for name in reversed(self.started):
            self("podman", "rm", "--force", "--ignore", "--time", "5", name)
        self("buildah", "rm", "--all")
        self("podman", "volume", "prune", "--force")
        self("buildah", "rmi", "--all", "--force")
        shutil.rmtree(self.storage)


@pytest.fixture(scope="module")
def engine(program: Callable[[str, str], str]) -> Iterator[_Engine]:
    for name in ("buildah", "mmdebstrap", "podman"):
        program(name, name)
    if os.geteuid() != 0:
        pytest.skip("images are built as root")
    found = _Engine(Path(tempfile.mkdtemp(prefix="wsi", dir="/tmp")))
    try:
        yield found
    finally:
        found.end()


def _commit_bases(engine: _Engine, tmp_path: Path) -> None:
    """Make the images that stand for those of registries: Debian's Python, and one with vLLM."""
    release = dict(
        line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if line
    )
    root = tmp_path / "base.tar"
    # vLLM for the CPU needs libnuma, which its own image has.
    packages = "--include=python3,python3-pip,ca-certificates,libnuma1"
    command = ["mmdebstrap", "--quiet", "--variant=apt", packages, release["VERSION_CODENAME"]]
    subprocess.run([*command, str(root)], check=True)
    container = engine("buildah", "from", "scratch")
    engine("buildah", "add", "--quiet", container, str(root), "/")
    # An image of Python has no packages of a distribution, which pip would have to leave alone.
    engine("buildah", "config", "--env", "PIP_BREAK_SYSTEM_PACKAGES=1", container)
    engine("buildah", "commit", "--quiet", container, "localhost/python")
    # The packages of this environment but ours, by links: they are mounted where they lie.
    links = tmp_path / "links"
    links.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not (path.name.startswith("weightsync-") or path.suffix == ".pth"):
            (links / path.name).symlink_to(path)
    folder = "/usr/local/lib/python{}.{}/dist-packages/".format(*sys.version_info)
    engine("buildah", "add", "--quiet", container, f"{links}/", folder)
    engine("buildah", "commit", "--quiet", container, "localhost/vllm")


@pytest.fixture(scope="module")
def base(engine: _Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the images that others are built on; returns a folder with pip's configuration."""
    folder = tmp_path_factory.mktemp("images")
    options = "".join(f"{name} = {text}\n" for name, text in pip_options().items())
    (folder / "pip.conf").write_text(f"[global]\n{options}")
    _commit_bases(engine, folder)
    return folder


def _build(engine: _Engine, base: Path, service: Service) -> None:
    """Build the image of a service; pip's configuration here is there for the build alone."""
    build = service.raw["build"]
    dockerfile = Path(build["context"], build["dockerfile"])
    ignored = Path(f"{dockerfile}.dockerignore")
    shown = {str(base / "pip.conf"): "/etc/pip.conf"}
    shown |= {path: path for path in (*folders_of_pip(), sys.prefix)}
    engine(
        *("buildah", "build", "--isolation=chroot", "--network=host"),
        *(f"--volume={path}:{inside}:ro" for path, inside in shown.items()),
        *([f"--ignorefile={ignored}"] if ignored.exists() else []),
        *("--build-arg=PYTHON_IMAGE=localhost/python", "--build-arg=VLLM_IMAGE=localhost/vllm"),
        f"--file={dockerfile}",
        f"--target={build['target']}",
        f"--tag={service.raw['image']}",
        build["context"],
    )


def _run(engine: _Engine, service: Service, *options: str) -> None:
    """Start a service as the compose file says, and return when its health check succeeds."""
    raw: dict[str, Any] = service.raw
    engine.started.append(service.name)
    engine(
        *("podman", "run", "--detach", f"--name={service.name}", *_LIMITS, *options),
        *(f"--env={key}={value}" for key, value in service.environment.items()),
        *(f"--volume={m.source}:{m.target}{':ro' * m.read_only}" for m in service.mounts),
        *(f"--tmpfs={path}" for path in service.tmpfs),
        *(f"--security-opt={text.replace(':true', '')}" for text in raw["security_opt"]),
        *(f"--cap-drop={text}" for text in raw["cap_drop"]),
        *(["--read-only"] if service.read_only else []),
        *(["--init"] if raw.get("init") else []),
        f"--user={service.uid}:{service.gid}",
        f"--shm-size={service.shm_bytes}",
        f"--entrypoint={json.dumps(raw['entrypoint'])}",
        f"localhost/{raw['image']}",
        *raw["command"],
    )
    end = time.monotonic() + _START_S
    while (ran := engine.says(service.name, *service.healthcheck)).returncode:
        running = engine("podman", "inspect", "--format={{.State.Running}}", service.name)
        logs = subprocess.run(
            [*engine._own("podman"), "logs", service.name], capture_output=True, check=False
        )
        assert running == "true", logs
        assert time.monotonic() < end, (ran, logs)
        # Each try starts a Python, which the service's own start has to wait for.
        time.sleep(2)


#: What a client asks vLLM for; the image of vLLM need not have curl.
_ASK = """
import json, urllib.request
asked = {"model": "default", "prompt": "The", "max_tokens": 8, "temperature": 0}
request = urllib.request.Request("http://127.0.0.1:8000/v1/completions",
    json.dumps(asked).encode(), {"content-type": "application/json"})
with urllib.request.urlopen(request, timeout=60) as answer:
    print(answer.headers["x-weightsync-version"], json.load(answer)["choices"][0]["text"])
"""


@pytest.mark.vllm
@pytest.mark.battery
@pytest.mark.timeout(1800)
def test_a_push_is_served_by_containers_of_the_built_images(
    engine: _Engine, base: Path, docker_compose: str
) -> None:
    model = make_checkpoint(engine.storage / "model", dtype="bfloat16", seed=1)
    later = make_checkpoint(engine.storage / "later", dtype="bfloat16", seed=2)
    for path in (engine.storage, model, later, *model.iterdir(), *later.iterdir()):
        path.chmod(0o755 if path.is_dir() else 0o644)
    variables = {"MODEL_DIR": str(model)}
    services = load(docker_compose, "docker-compose.yml", variables=variables)
    server, vllm = services["weightsync-server"], services["vllm"]
    _build(engine, base, server)
    _build(engine, base, vllm)
    _run(engine, server, "--network=none", f"--volume={later}:/later:ro")
    for target in {mount.target for mount in server.mounts}:
        mode, uid, gid = folders_of_images()[target]
        seen = engine.says(server.name, "stat", "-c", "%a %u %g", target).stdout
        assert seen == f"{mode:o} {uid} {gid}\n", target
    # What a build was given of this machine's pip is not in the image.
    assert engine.says(server.name, "cat", "/etc/pip.conf").stdout == ""
    packages = f"--volume={sys.prefix}:{sys.prefix}:ro"
    _run(engine, vllm, f"--network=container:{server.name}", packages)
    before = engine.says(vllm.name, "python3", "-c", _ASK).stdout
    for words in (["push", "/later"], ["apply"]):
        done = engine.says(server.name, "weightsync", *words)
        assert done.returncode == 0, done
    after = engine.says(vllm.name, "python3", "-c", _ASK).stdout
    assert before.split()[0] == "1"
    assert after.split()[0] == "2"
    assert before.split()[1:] != after.split()[1:]
    assert engine.says(vllm.name, "weightsync", "rollback").returncode == ExitCode.DENIED


@pytest.mark.battery
@pytest.mark.timeout(900)
def test_etcd_of_the_built_image_is_healthy(
    engine: _Engine, base: Path, docker_compose: str
) -> None:
    named = ("MINIO_ROOT_PASSWORD", "ORIGIN_SECRET", "FOLLOWER_SECRET")
    variables = dict.fromkeys(named, "x") | {"MODEL_DIR": "/model"}
    etcd = load(docker_compose, "docker-compose.fleet.yml", variables=variables)["etcd"]
    _build(engine, base, etcd)
    _run(engine, etcd, "--network=none")
