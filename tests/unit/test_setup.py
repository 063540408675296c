"""Where `make setup` takes PyTorch from: pip's own sources first, else one variable, or it alone.

Small wheels named torch stand in for PyTorch's, in folders laid out as a package index.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tomllib
import zipfile
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from packaging.specifiers import SpecifierSet

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def venv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("setup") / "venv"
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    return folder


@pytest.fixture
def make_torch(
    venv: Path, tmp_path: Path, program: Callable[[str, str], str]
) -> Callable[..., str]:
    """Return a function that runs `make torch` and tells which index the result came from."""

    def run(*arguments: str, version: str, own_source: str) -> str:
        # What the make that may have started these tests exported must not steer this one.
        outer = ("PIP_", "MAKE", "MFLAGS", "TORCH_")
        env = {name: text for name, text in os.environ.items() if not name.startswith(outer)}
        env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": own_source, "PIP_RETRIES": "0"}
        command = [program("make", "make"), "torch", f"VENV={venv}", f"TORCH_VERSION={version}"]
        ran = subprocess.run(
            [*command, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )
        assert ran.returncode == 0, ran.stdout + ran.stderr
        code = "from importlib.metadata import metadata as m; print(m('torch')['Summary'])"
        return subprocess.check_output([venv / "bin/python", "-c", code], text=True).strip()

    return run


def _index(folder: Path, *versions: str) -> str:
    """Make a package index that holds these versions of torch; its name is in their metadata."""
    project = folder / "simple/torch"
    project.mkdir(parents=True)
    for version in versions:
        info = f"torch-{version}.dist-info"
        with zipfile.ZipFile(project / f"torch-{version}-py3-none-any.whl", "w") as wheel:
            text = f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n"
            wheel.writestr(f"{info}/METADATA", f"{text}Summary: {folder.name}\n")
            wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            wheel.writestr(f"{info}/RECORD", "")
    links = "".join(f'<a href="{path.name}">{path.name}</a>\n' for path in project.glob("*.whl"))
    (project / "index.html").write_text(f"<!DOCTYPE html><html><body>{links}</body></html>")
    return (folder / "simple").as_uri()


def test_a_given_index_is_the_only_one_asked(
    tmp_path: Path, make_torch: Callable[..., str]
) -> None:
    given = _index(tmp_path / "given", "1.0.1+cpu")
    own = _index(tmp_path / "own", "1.0.1+cpu")
    assert make_torch(f"TORCH_INDEX_URL={given}", version="1.0.1+cpu", own_source=own) == "given"


def test_what_pip_finds_itself_comes_before_the_default(
    tmp_path: Path, make_torch: Callable[..., str]
) -> None:
    default = _index(tmp_path / "default", "1.0.2+cpu")
    own = _index(tmp_path / "own", "1.0.2+cpu")
    setting = f"--eval=TORCH_INDEX_URL := {default}"
    assert make_torch(setting, version="1.0.2+cpu", own_source=own) == "own"


def test_the_default_is_asked_when_pip_finds_only_the_cuda_build(
    tmp_path: Path, make_torch: Callable[..., str]
) -> None:
    default = _index(tmp_path / "default", "1.0.3+cpu")
    own = _index(tmp_path / "own", "1.0.3")
    setting = f"--eval=TORCH_INDEX_URL := {default}"
    assert make_torch(setting, version="1.0.3+cpu", own_source=own) == "default"


def test_the_default_is_pytorchs_own_index() -> None:
    ran = subprocess.run(
        ["make", "-pn", "help"],
        cwd=ROOT,
        env={name: text for name, text in os.environ.items() if name in {"PATH", "HOME"}},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "TORCH_INDEX_URL = https://download.pytorch.org/whl/cpu" in ran.stdout.splitlines()


def test_a_missing_library_is_named_before_anything_is_loaded(tmp_path: Path) -> None:
    python = tmp_path / "bin/python"
    python.parent.mkdir()
    # A Python whose loader does not find the library: any other call of it would be printed.
    python.write_text('#!/bin/sh\ncase "$*" in *libnuma*) exit 1;; esac\necho "$*"\n')
    python.chmod(0o755)
    ran = subprocess.run(
        ["bash", "scripts/setup.sh"],
        cwd=ROOT,
        env=os.environ | {"VENV": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ran.returncode, ran.stdout) == (1, "")
    assert ran.stderr.startswith("Install libnuma (Debian: libnuma1)")


def test_the_oldest_python_that_is_supported_can_install_every_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest = project["requires-python"].removeprefix(">=") + ".0"
    pinned = [line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines()]
    unfit = {}
    for name, release in pinned:
        with contextlib.suppress(PackageNotFoundError):
            found = distribution(name)
            wanted = SpecifierSet(found.metadata["Requires-Python"] or "")
            # Another release is installed where a pin has been changed since.
            if found.version == release and not wanted.contains(oldest):
                unfit[f"{name}=={release}"] = str(wanted)
    assert unfit == {}
