"""The wheel as a user gets it: built from an export without git, installed apart from the tree."""

from __future__ import annotations

import email
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path, PurePosixPath

import pytest
from packaging.requirements import Requirement

from tests.support.wheels import ROOT, build_wheel, export_tree, run_command

# Builds compile, and an installation copies.
pytestmark = pytest.mark.timeout(180)

FOLDERS = {
    "weightsync": ROOT / "weightsync",
    "weightsync_server": ROOT / "server/weightsync_server",
    "weightsync_client": ROOT / "client/weightsync_client",
}


KERNELS = "weightsync/delta/kernels"


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_tree(tmp_path_factory.mktemp("export"))


@pytest.fixture(scope="module")
def wheel(export: Path) -> Path:
    return build_wheel(export)


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
def test_every_module_page_and_marker_is_in_it(names: set[str], package: str) -> None:
    folder = FOLDERS[package]
    patterns = ("*.py", "*.pyi", "*.html", "*.css", "*.js")
    files = [path for pattern in patterns for path in folder.rglob(pattern)]
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
    run_command(sys.executable, "-m", "venv", "--without-pip", env, cwd=tmp_path)
    python = env / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", python)
    run_command(*pip, "install", "-q", "--no-deps", "--no-index", wheel, cwd=tmp_path)
    packages = Path(
        run_command(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    # The dependencies come from this environment, but not its editable weightsync: a folder
    # named in a .pth file is put on the path without reading the .pth files inside it.
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    for package in FOLDERS:
        found = run_command(
            python, "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path
        )
        assert Path(found.strip()).is_relative_to(packages)
    for command in ("weightsync", "weightsync-server"):
        assert "Usage" in run_command(env / "bin" / command, "--help", cwd=tmp_path).title()


@pytest.fixture
def no_compiler(tmp_path: Path) -> dict[str, str]:
    """An environment in which no compiler is found."""
    if importlib.util.find_spec("ziglang"):
        pytest.skip("ziglang is installed")
    return {"CC": "", "PATH": str(tmp_path)}


def test_a_wheel_carries_the_kernels_that_it_is_tagged_for(
    wheel: Path, names: set[str], tmp_path: Path
) -> None:
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    assert f"{KERNELS}/kernels.so" in names
    assert wheel.name.endswith(f"-py3-none-linux_{platform.machine()}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    program = "from weightsync.delta import kernels; print(kernels.__file__, kernels.available())"
    told = run_command(sys.executable, "-c", program, cwd=tmp_path, PYTHONPATH=str(tmp_path))
    assert str(tmp_path) in told
    assert "generic" in told


def test_without_a_compiler_a_wheel_is_for_all_and_a_line_tells_it(
    export: Path, no_compiler: dict[str, str]
) -> None:
    command = (sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "plain")
    told = run_command(*command, cwd=export, **no_compiler)
    assert "No C compiler" in told
    (built,) = (export / "plain").glob("*.whl")
    assert built.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(built) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".so")]


def test_a_wheel_can_be_built_from_the_source_distribution(export: Path) -> None:
    run_command(
        sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", "source", cwd=export
    )
    (archive,) = (export / "source").iterdir()
    shutil.unpack_archive(archive, export / "source", filter="data")
    (tree,) = (path for path in (export / "source").iterdir() if path.is_dir())
    run_command(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out", cwd=tree)
    (built,) = (tree / "out").iterdir()
    with zipfile.ZipFile(built) as found:
        library = f"{KERNELS}/kernels.so" in found.namelist()
    assert library is (shutil.which("cc") is not None)


def test_a_compiler_that_fails_is_named(export: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "scripts/build_kernels.py"],
        cwd=export,
        env=os.environ | {"CC": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode != 0
    assert "'false'" in ran.stderr
    assert not list((export / KERNELS).glob("*.so"))
    assert not list((export / KERNELS).glob("*.tmp"))
