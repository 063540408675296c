"""What can be taken away, taken away: without its folder and its line in the list all else works.

Each extension is deleted from a copy of the tree. There no import may name it, whether it is run or
not, every module of the core is imported, and tests of a few fast rooms run. All of the core's unit
tests take ten minutes: `make battery` runs them once, without any extension.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.stages import STAGES

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
#: Where each package lies.
_PACKAGES = {"weightsync": ".", "weightsync_server": "server", "weightsync_client": "client"}
#: Packages of extensions; those with a list have it in their `__init__`.
_LISTS = ("weightsync.vllm.extensions", "weightsync_server.extensions")
_UNLISTED = ("weightsync_client.integrations", "weightsync_client.trainer")
#: What the copy has beside the packages.
_BESIDE = ("tests", "benchmarks", "examples", "scripts", "protos", "docs", "pyproject.toml")
#: Tests of the tree itself, all of it; they have read it before.
_OF_THE_TREE = (
    "test_borders",
    "test_extensions",
    "test_failpoints",
    "test_imports",
    "test_packaging",
    "test_plants",
    "test_prove",
    "test_setup",
    "test_stages",
)

#: Imports modules, then runs tests, in one process: loading torch twice takes longer than both.
_PROGRAM = """
import importlib, sys
import pytest
here, count = sys.argv[1], int(sys.argv[2])
for name in sys.argv[3:3 + count]:
    module = importlib.import_module(name)
    assert module.__file__.startswith(here), module.__file__
sys.exit(pytest.main(sys.argv[3 + count:]))
"""


@dataclass(frozen=True)
class Extension:
    """One that can be taken away.

    Attributes:
        module: Its package or module.
        core: Modules below this are imported without it.
        rooms: Tests that run without it, and the words that choose among them.
    """

    module: str
    core: str
    rooms: tuple[str, ...]


_SERVER = (
    "tests/unit/server/auth/test_roles.py",
    "tests/unit/server/engine/test_engine_names.py",
    # Starts a whole server.
    "tests/unit/server/rpc/test_refused_calls.py",
    "-k",
    "test_roles or test_engine_names or health",
)
_VLLM = (
    "tests/unit/vllm/test_worker_protocol.py",
    "tests/unit/vllm/test_reserved_room.py",
    "tests/unit/vllm/bridge/test_resume_guard.py",
)
_CLIENT = (
    "tests/unit/client/test_access.py",
    "tests/unit/client/test_errors.py",
)
EXTENSIONS = (
    Extension("weightsync.vllm.extensions.answers", "weightsync.vllm", _VLLM),
    Extension("weightsync.vllm.extensions.received", "weightsync.vllm", _VLLM),
    Extension("weightsync.vllm.extensions.request_spans", "weightsync.vllm", _VLLM),
    Extension("weightsync.vllm.extensions.train_forward", "weightsync.vllm", _VLLM),
    Extension("weightsync_server.extensions.trainer", "weightsync_server", _SERVER),
    Extension("weightsync_server.extensions.update_committer", "weightsync_server", _SERVER),
    Extension("weightsync_server.extensions.vllm_verbs", "weightsync_server", _SERVER),
    Extension("weightsync_client.integrations", "weightsync_client", _CLIENT),
    Extension("weightsync_client.trainer", "weightsync_client", _CLIENT),
)
_all = pytest.mark.parametrize("extension", EXTENSIONS, ids=lambda one: one.module)


class _Unlisted(ast.NodeTransformer):
    """Removes an extension from a list: what imports it, and what is made of that."""

    def __init__(self, gone: frozenset[str]) -> None:
        self._gone = gone
        self.names: set[str] = set()

    def visit_ImportFrom(self, node: ast.ImportFrom) -> ast.ImportFrom | None:
        if self._gone.isdisjoint(_named(node)):
            return node
        self.names |= {alias.asname or alias.name for alias in node.names}
        return None

    def visit_Tuple(self, node: ast.Tuple) -> ast.Tuple:
        node.elts = [each for each in node.elts if not self._uses(each)]
        return node

    def visit_Dict(self, node: ast.Dict) -> ast.Dict:
        kept = [
            pair for pair in zip(node.keys, node.values, strict=True) if not self._uses(pair[1])
        ]
        node.keys, node.values = [key for key, _ in kept], [value for _, value in kept]
        return node

    def _uses(self, node: ast.AST) -> bool:
        return any(isinstance(part, ast.Name) and part.id in self.names for part in ast.walk(node))


def _named(node: ast.AST) -> Iterator[str]:
    """Yield what an import names: modules, and perhaps things in them."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _place(tree: Path, module: str) -> Path:
    """Return the path of a module or package, without the ending."""
    return tree.joinpath(_PACKAGES[module.partition(".")[0]], *module.split("."))


def _gone(*extensions: Extension) -> frozenset[str]:
    """Return the modules that a copy lacks."""
    roots = tuple(f"{extension.module}." for extension in extensions)
    return frozenset(name for name, _ in _modules(ROOT) if f"{name}.".startswith(roots))


def _delete(tree: Path, extension: Extension) -> None:
    place = _place(tree, extension.module)
    if place.is_dir():
        shutil.rmtree(place)
    else:
        place.with_suffix(".py").unlink()
    if extension.module.rpartition(".")[0] in _LISTS:
        listed = _place(tree, extension.module).parent / "__init__.py"
        parsed, unlisted = ast.parse(listed.read_text()), _Unlisted(_gone(extension))
        listed.write_text(ast.unparse(unlisted.visit(parsed)))
        assert unlisted.names, "it is not in the list"


def _copy(tree: Path, *lacking: Extension) -> Path:
    """Return a copy of the tree that lacks some extensions."""
    kept = shutil.ignore_patterns("node_modules", ".venv", "build")
    for name in _BESIDE:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, tree / name, ignore=kept)
        else:
            shutil.copy2(ROOT / name, tree / name)
    for package, folder in _PACKAGES.items():
        shutil.copytree(ROOT / folder / package, tree / folder / package)
    for extension in lacking:
        _delete(tree, extension)
    return tree


def _modules(tree: Path) -> Iterator[tuple[str, Path]]:
    for package, folder in _PACKAGES.items():
        for path in sorted((tree / folder / package).rglob("*.py")):
            parts = path.relative_to(tree / folder).with_suffix("").parts
            yield ".".join(parts[: -1 if parts[-1] == "__init__" else None]), path


def _core(tree: Path) -> Iterator[tuple[str, Path]]:
    """Yield the modules that are no extensions, and the lists."""
    for module, path in _modules(tree):
        inside = (f"{each}." for each in (*_LISTS, *_UNLISTED))
        if not module.startswith(tuple(inside)) and module not in _UNLISTED:
            yield module, path


def _run(tree: Path, cores: tuple[str, ...], *tests: str) -> None:
    modules = [
        module
        for module, _ in _core(tree)
        if f"{module}.".startswith(cores) and not module.endswith("__main__")
    ]
    assert len(modules) > 30
    paths = os.pathsep.join(str(tree / folder) for folder in _PACKAGES.values())
    plugins = ("-p", "no:cacheprovider", "-q", "-m", "not gpu and not battery and not alone")
    ran = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tree), str(len(modules)), *modules, *plugins, *tests],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:] + ran.stderr[-4000:]


def test_every_extension_is_taken_away() -> None:
    found = {
        f"{package}.{path.stem}"
        for package in _LISTS
        for path in _place(ROOT, package).iterdir()
        if path.stem != "__init__" and (path.suffix == ".py" or (path / "__init__.py").exists())
    }
    missing = (found | set(_UNLISTED)) - {extension.module for extension in EXTENSIONS}
    assert not missing, f"add {missing} to EXTENSIONS above, with the tests that run without it"
    assert {extension.module for extension in EXTENSIONS} == found | set(_UNLISTED)


@_all
def test_without_it_all_else_works(extension: Extension, tmp_path: Path) -> None:
    gone, without = _gone(extension), _copy(tmp_path / "tree", extension)
    missing = [
        f"{path.relative_to(without)}:{node.lineno} imports {name}"
        for _, path in _modules(without)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom)
        for name in _named(node)
        if name in gone
    ]
    assert missing == []
    _run(without, (f"{extension.core}.",), *extension.rooms)


@pytest.mark.battery
@pytest.mark.timeout(3600)
def test_without_any_the_unit_tests_of_the_core_pass(tmp_path: Path) -> None:
    gone, part = _gone(*EXTENSIONS), STAGES["test"][0]
    without = _copy(tmp_path / "tree", *EXTENSIONS)
    left_out = [
        path.relative_to(without)
        for path in sorted((without / "tests" / "unit").rglob("test_*.py"))
        if path.stem in _OF_THE_TREE
        or any(
            name in gone for node in ast.walk(ast.parse(path.read_text())) for name in _named(node)
        )
    ]
    ignored = [f"--ignore={path}" for path in (*part.but, *left_out)]
    cores = tuple(f"{package}." for package in _PACKAGES)
    _run(without, cores, "-n", str(os.cpu_count() or 1), *ignored, "tests/unit")
