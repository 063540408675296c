"""The wheel as a user gets it: built from an export without git, installed apart from the tree."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = {
    "weightsync": ROOT / "weightsync",
    "weightsync_server": ROOT / "server/weightsync_server",
    "weightsync_client": ROOT / "client/weightsync_client",
}


def _run(*command: str | Path, cwd: Path) -> str:
    """Run a command to its end and return what it printed."""
    ran = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    export = tmp_path_factory.mktemp("export")
    listing = _run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(lambda line: (ROOT / line).is_file(), listing.splitlines()):
        (export / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, export / name)
    _run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out", cwd=export)
    (built,) = (export / "out").iterdir()
    return built


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def requirements(wheel: Path) -> list[Requirement]:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        message = email.message_from_bytes(archive.read(name))
    return [Requirement(line) for line in message.get_all("Requires-Dist", [])]


def test_only_our_packages_are_at_the_top(names: set[str]) -> None:
    tops = {PurePosixPath(name).parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(FOLDERS)


@pytest.mark.parametrize("package", FOLDERS)
def test_every_module_and_marker_is_in_it(names: set[str], package: str) -> None:
    folder = FOLDERS[package]
    files = [path for pattern in ("*.py", "*.pyi") for path in folder.rglob(pattern)]
    wanted = {f"{package}/{path.relative_to(folder).as_posix()}" for path in files}
    assert sorted((wanted | {f"{package}/py.typed"}) - names) == []


@pytest.mark.parametrize("stub", ["v1/weightsync", "engine/v1/engine", "debug/v1/debug"])
@pytest.mark.parametrize("ending", ["_pb2.py", "_pb2.pyi", "_pb2_grpc.py", "_pb2_grpc.pyi"])
def test_the_stubs_are_in_it(names: set[str], stub: str, ending: str) -> None:
    assert f"weightsync/{stub}{ending}" in names


def test_nothing_can_replace_the_torch_of_an_engine(requirements: list[Requirement]) -> None:
    heavy = ("torch", "vllm", "nvidia", "cuda", "triton", "transformers")
    assert [str(line) for line in requirements if line.name.startswith(heavy)] == []


def test_grpc_companions_share_one_floor_and_no_pin(requirements: list[Requirement]) -> None:
    assert {str(line.specifier) for line in requirements if line.name.startswith("grpcio")} == {
        ">=1.81.1"
    }


def test_both_commands_run_from_the_installed_wheel(wheel: Path, tmp_path: Path) -> None:
    env = tmp_path / "env"
    _run(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    python = env / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    _run(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    packages = Path(
        _run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    # The dependencies come from this environment, but not its editable weightsync: a folder
    # named in a .pth file is put on the path without reading the .pth files inside it.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for package in FOLDERS:
        found = _run(python, "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path)
        assert Path(found.strip()).is_relative_to(packages)
    for command in ("weightsync", "weightsync-server"):
        assert "Usage" in _run(env / "bin" / command, "--help", cwd=tmp_path).title()
