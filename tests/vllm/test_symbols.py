"""Every vLLM symbol that we use exists in every release that we are written for.

The releases' wheels are downloaded by pip, about 300 MB each, and only the modules in question are
kept, under WEIGHTSYNC_TEST_CACHE. Nothing is imported.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.vllm_symbols import FIRST_RELEASE, LAST_RELEASE, SYMBOLS, found, modules

if TYPE_CHECKING:
    from collections.abc import Callable

CACHE = Path(os.environ.get("WEIGHTSYNC_TEST_CACHE") or Path.home() / ".cache/weightsync-tests")


def _missing(source_of: Callable[[str], str | None]) -> list[str]:
    return [
        f"{' or '.join(symbol.places)} ({symbol.used_for})"
        for symbol in SYMBOLS
        if symbol.needed and not any(found(place, source_of) for place in symbol.places)
    ]


def _paths(module: str) -> tuple[str, str]:
    stem = module.replace(".", "/")
    return f"{stem}.py", f"{stem}/__init__.py"


def _reader(root: Path) -> Callable[[str], str | None]:
    @cache
    def source_of(module: str) -> str | None:
        for path in _paths(module):
            if (root / path).is_file():
                return (root / path).read_text()
        return None

    return source_of


def _pip(*arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "pip", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if done.returncode:
        pytest.skip(f"pip {arguments[0]} failed: {done.stderr.strip()[-300:]}")
    return done.stdout


def _releases() -> list[str]:
    listed = re.search(r"Available versions: (.*)", _pip("index", "versions", "vllm"))
    if listed is None:
        pytest.skip("the package index lists no vLLM")
    every = [release.strip() for release in listed.group(1).split(",")]
    numbered = [(tuple(map(int, release.split(".")[:2])), release) for release in every]
    return [release for number, release in numbered if FIRST_RELEASE <= number <= LAST_RELEASE]


def _sources(release: str) -> Path:
    kept = CACHE / f"vllm-{release}"
    wanted = {path for module in modules() for path in _paths(module)}
    if not (kept / "complete").exists() or (kept / "complete").read_text() != _signature():
        with tempfile.TemporaryDirectory() as directory:
            _pip(
                "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:", "--quiet",
                "--python-version=3.12", "--platform=manylinux_2_31_x86_64",
                "--platform=manylinux_2_28_x86_64", "--platform=manylinux1_x86_64",
                f"--dest={directory}", f"vllm=={release}",
            )  # fmt: skip
            (wheel,) = Path(directory).glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(kept, wanted & set(archive.namelist()))
        (kept / "complete").write_text(_signature())
    return kept


def _signature() -> str:
    return "\n".join(sorted(modules()))


def test_installed_release_has_every_symbol() -> None:
    spec = find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    assert not _missing(_reader(Path(spec.origin).parents[1]))


def test_look_up_tells_what_is_there_from_what_is_not() -> None:
    source = (
        "import os\nif 1:\n    x = 2\nclass A:\n    y: int\n    def f(self):\n        self.z = 1\n"
        "class B(A):\n    pass\ndef g():\n    layer.w = 1\n"
    )

    def source_of(module: str) -> str | None:
        return source if module == "m" else None

    there = ("m:os", "m:x", "m:A", "m:A.y", "m:A.f", "m:B.z", "m:g", "m:g#layer.w")
    absent = ("n:x", "m:y", "m:A.x", "m:x.y", "m:g#layer.v", "m:f")
    assert all(found(place, source_of) for place in there)
    assert not any(found(place, source_of) for place in absent)


@pytest.mark.timeout(900)
def test_all_releases_have_every_symbol() -> None:
    releases = _releases()
    assert len(releases) >= LAST_RELEASE[1] - FIRST_RELEASE[1] + 1
    missing = {release: _missing(_reader(_sources(release))) for release in releases}
    assert not {release: names for release, names in missing.items() if names}
