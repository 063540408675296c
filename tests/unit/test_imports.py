"""Which package may import which: the rooms of the architecture, read from every import statement.

Imports inside functions and under TYPE_CHECKING count: a direction is a direction.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "weightsync": "weightsync",
    "weightsync_server": "server/weightsync_server",
    "weightsync_client": "client/weightsync_client",
}
OURS = tuple(PACKAGES)


@dataclass(frozen=True)
class Rule:
    """No module within `importers` imports one within `target`, but those within `allowed`."""

    importers: tuple[str, ...]
    target: str
    allowed: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{'+'.join(self.importers)} must not import {self.target}"

    def forbids(self, importer: str, imported: str) -> bool:
        return (
            _within(importer, self.importers)
            and not _within(importer, self.allowed)
            and _within(imported, (self.target,))
        )


RULES = (
    Rule(("weightsync",), "weightsync_server"),
    Rule(("weightsync",), "weightsync_client"),
    Rule(("weightsync_server",), "weightsync_client"),
    Rule(("weightsync_client",), "weightsync_server"),
    Rule(OURS, "vllm", allowed=("weightsync.vllm",)),
    Rule(
        OURS,
        "weightsync.vllm",
        allowed=("weightsync.vllm", "weightsync_server.engine.drivers.embedded"),
    ),
    Rule(("weightsync_server.push",), "weightsync_server.engine"),
    Rule(("weightsync_server.engine",), "weightsync_server.push"),
    Rule(("weightsync_server.catalog",), "weightsync_server.push"),
    Rule(("weightsync_server.catalog",), "weightsync_server.engine"),
    Rule(("weightsync_server.store",), "weightsync_server.push"),
    Rule(("weightsync_server.store",), "weightsync_server.engine"),
    Rule(("weightsync_server.store",), "weightsync_server.catalog"),
)


def _within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def _modules(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the import name and the file of every module of ours below `root`."""
    for package, folder in PACKAGES.items():
        for path in sorted((root / folder).rglob("*.py")):
            parts = path.relative_to(root / folder).with_suffix("").parts
            yield ".".join((package, *(part for part in parts if part != "__init__"))), path


def _imported(path: Path, module: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of everything that a file imports.

    `from a import b` may name the module a.b, so it yields both a and a.b.
    """
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join((*above, base)).rstrip(".")
            yield node.lineno, base
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def _broken(root: Path, rule: Rule) -> list[str]:
    """Return "file:line: import" for every import below `root` that the rule forbids."""
    return sorted(
        {
            f"{path.relative_to(root)}:{line}: {imported}"
            for module, path in _modules(root)
            for line, imported in _imported(path, module)
            if rule.forbids(module, imported)
        }
    )


def _write(root: Path, module: str, text: str) -> None:
    """Write a module, as the __init__ of its package, into a made-up tree."""
    package, _, rest = module.partition(".")
    folder = root / PACKAGES[package] / rest.replace(".", "/")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "__init__.py").write_text(text)


@pytest.mark.parametrize("rule", RULES, ids=str)
def test_no_import_breaks_the_rule(rule: Rule) -> None:
    assert _broken(ROOT, rule) == []


def test_the_rooms_that_the_rules_name_exist() -> None:
    # A renamed room would leave its rules true of nothing.
    found = {module for module, _ in _modules(ROOT)}
    named = {room for rule in RULES for room in (*rule.importers, rule.target)} - {"vllm"}
    assert sorted(named - found) == []


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize(
    "statement",
    [
        "import {target}\n",
        "import {target}.deep as name\n",
        "from {target} import name\n",
        "def late():\n    import {target}.deep\n",
        "if TYPE_CHECKING:\n    from {target}.deep import name\n",
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, rule: Rule, statement: str) -> None:
    _write(tmp_path, rule.importers[-1], statement.format(target=rule.target))
    assert _broken(tmp_path, rule)


@pytest.mark.parametrize("rule", [rule for rule in RULES if rule.allowed], ids=str)
def test_an_allowed_import_passes(tmp_path: Path, rule: Rule) -> None:
    for module in rule.allowed:
        _write(tmp_path, module, f"import {rule.target}\n")
    assert _broken(tmp_path, rule) == []


def test_a_room_imported_from_its_parent_is_found(tmp_path: Path) -> None:
    _write(tmp_path, "weightsync_server.store", "from weightsync_server import versions\n")
    rule = Rule(("weightsync_server.store",), "weightsync_server.catalog")
    assert _broken(tmp_path, rule)


def test_a_relative_import_is_resolved(tmp_path: Path) -> None:
    _write(tmp_path, "weightsync_server.push", "from ..apply import switch\n")
    rule = Rule(("weightsync_server.push",), "weightsync_server.engine")
    assert _broken(tmp_path, rule) == [
        "server/weightsync_server/push/__init__.py:1: weightsync_server.engine",
        "server/weightsync_server/push/__init__.py:1: weightsync_server.engine.cutover",
    ]


def test_a_name_that_only_begins_alike_is_another_package(tmp_path: Path) -> None:
    _write(tmp_path, "weightsync_client", "import vllm_tools\nimport weightsync_servers\n")
    assert [line for rule in RULES for line in _broken(tmp_path, rule)] == []


@pytest.mark.parametrize(
    "module",
    ["weightsync", "weightsync_client", "weightsync_client.cli", "weightsync_server.cli"],
)
def test_importing_it_loads_neither_torch_nor_vllm(module: str) -> None:
    program = f"import sys, {module}; print(*sorted({{'torch', 'vllm'}} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr


def test_the_codec_loads_neither_engines_nor_grpc_nor_a_compiler() -> None:
    heavy = {"grpc", "llvmlite", "numba", "torch", "vllm"}
    code = "import sys, weightsync.delta as delta; delta.warm_up()"
    program = f"{code}; print(*sorted({heavy} & set(sys.modules)))"
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert (ran.returncode, ran.stdout.strip()) == (0, ""), ran.stderr
