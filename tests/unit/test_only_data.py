"""Bytes are only data (invariant 12): no way from outside bytes to code, read from every module.

The walk starts where bytes come in and follows every import of ours, those inside functions and
under TYPE_CHECKING included. It asserts about the code that may run, not about what a test ran.
"""

from __future__ import annotations

import ast
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "weightsync": ROOT / "weightsync",
    "weightsync_server": ROOT / "server" / "weightsync_server",
    "weightsync_client": ROOT / "client" / "weightsync_client",
}
#: The server, the fetcher processes, the client, and what runs inside vLLM: all of it.
ROOTS = (
    "weightsync_server.cli",
    "weightsync_server.app",
    "weightsync_server.workers.fetch.fetch_main",
    "weightsync_client.cli.main",
    "weightsync_client.trainer.__main__",
    "weightsync.vllm.plugin",
    "weightsync.vllm.endpoint",
    "weightsync.vllm.worker.worker_methods",
    "weightsync.vllm.shadow.loader_main",
    "weightsync.vllm.shadow.loader_service",
)
#: What bytes from outside pass through: a walk that misses one of these proves nothing.
ON_THE_WAY = (
    "weightsync_server.rpc.servicers",
    "weightsync_server.usecases.push_calls",
    "weightsync_server.push.messages",
    "weightsync_server.push.sources.grpc_stream",
    "weightsync_server.push.shard_part",
    "weightsync_server.store.local.local_store",
    "weightsync_server.store.local.recovery",
    "weightsync.wire.child_channel",
    "weightsync_server.auth.principals",
    "weightsync.model.manifest",
    "weightsync.model.layout",
    "weightsync.shm.segment_socket",
    "weightsync.shm.staged_version",
    "weightsync.shm.segments",
)
#: Modules that turn bytes into objects with code, or names into modules.
MODULES = frozenset(
    {"pickle", "_pickle", "cloudpickle", "dill", "joblib", "jsonpickle", "marshal", "shelve", "dbm"}
    | {"importlib", "imp", "runpy", "pkgutil", "zipimport", "code", "codeop", "yaml", "xmlrpc"}
)
#: Names that run text, wherever they are called.
CALLS = frozenset({"eval", "exec", "compile", "__import__", "execfile", "breakpoint"})
#: Methods that do, by the object they belong to.
METHODS = frozenset(
    {
        ("torch", "load"),
        ("torch", "jit"),
        ("np", "load"),
        ("numpy", "load"),
        ("pandas", "read_pickle"),
        ("multiprocessing", "Queue"),
        ("multiprocessing", "Pipe"),
        ("multiprocessing", "Manager"),
        ("os", "system"),
        ("os", "popen"),
        ("subprocess", "getoutput"),
    }
)
#: (module, what): why it is no way for outside bytes.
EXCEPTIONS = {
    ("weightsync.vllm.bridge.embedded", "importlib"): (
        "finds vLLM's own modules, whose places differ by release, by names written in our code"
    ),
    ("weightsync.vllm.cpu_plain", "importlib"): (
        "finds vLLM's own modules, which not every release has, by names written in our code"
    ),
    ("weightsync.vllm.shadow.vllm_load", "importlib"): (
        "imports the module of vLLM's worker that the configuration of the engine names"
    ),
    ("weightsync_client.cli.up", "importlib"): (
        "asks whether packages named in our code are installed, and imports none"
    ),
    ("weightsync_client.trainer.trainer_process", "importlib"): (
        "imports the class that the operator named with --trainer"
    ),
    ("weightsync.vllm.shadow.loader_config", "pickle"): (
        "reads what the parent wrote into a pipe that only the two have"
    ),
}


def _path(module: str) -> Path | None:
    package, *rest = module.split(".")
    if package not in PACKAGES:
        return None
    base = PACKAGES[package].joinpath(*rest)
    for path in (base.with_suffix(".py"), base / "__init__.py"):
        if path.is_file():
            return path
    return None


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _reached() -> dict[str, ast.Module]:
    found: dict[str, ast.Module] = {}
    waiting = list(ROOTS)
    while waiting:
        module = waiting.pop()
        path = _path(module)
        if path is None or module in found:
            continue
        found[module] = ast.parse(path.read_text(), str(path))
        waiting += _imports(found[module])
        if "." in module:
            # Importing a module runs its package first.
            waiting.append(module.rpartition(".")[0])
    return found


def _ways(tree: ast.Module) -> Iterator[str]:
    """Yield every way from bytes to code in a module."""
    for name in _imports(tree):
        if name.partition(".")[0] in MODULES:
            yield name.partition(".")[0]
        if tuple(name.rsplit(".", 1)) in METHODS:
            yield name
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in CALLS:
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if (node.value.id, node.attr) in METHODS:
                yield f"{node.value.id}.{node.attr}"
            elif (node.value.id, node.attr) == ("builtins", node.attr) and node.attr in CALLS:
                yield node.attr
        elif isinstance(node, ast.keyword) and node.arg in ("allow_pickle", "shell"):
            # A plain False is harmless, and nothing else.
            yield from () if getattr(node.value, "value", None) is False else (node.arg,)


@pytest.fixture(scope="module")
def reached() -> dict[str, ast.Module]:
    return _reached()


def test_the_walk_meets_all_that_bytes_pass_through(reached: dict[str, ast.Module]) -> None:
    assert sorted(set(ON_THE_WAY) - set(reached)) == []


def test_no_module_on_the_way_runs_bytes(reached: dict[str, ast.Module]) -> None:
    found = {(module, way) for module, tree in reached.items() for way in _ways(tree)}
    assert sorted(found - set(EXCEPTIONS)) == []


def test_every_exception_is_needed(reached: dict[str, ast.Module]) -> None:
    found = {(module, way) for module, tree in reached.items() for way in _ways(tree)}
    assert sorted(set(EXCEPTIONS) - found) == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads as read",
        "def late():\n    from importlib import import_module",
        "import multiprocessing.connection\nq = multiprocessing.Queue()",
        "from torch import load",
        "x = torch.load(path)",
        "read = np.load",
        "np.fromfile(p, allow_pickle=True)",
        "eval(text)",
        "run = exec",
        "builtins.eval(text)",
        "subprocess.run(text, shell=True)",
    ],
)
def test_a_way_is_found(text: str) -> None:
    assert list(_ways(ast.parse(text)))


def _dropped(path: Path) -> Iterator[int]:
    """Yield the line of each check that `python -O` drops."""
    inside_vllm = path.is_relative_to(PACKAGES["weightsync"] / "vllm")
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name) and node.id == "__debug__":
            yield node.lineno
        elif isinstance(node, ast.Assert):
            # There a few tell mypy a type; ids come there from our server, bytes never.
            text = ast.unparse(node.test)
            narrows = text.endswith(" is not None") or text.startswith("isinstance(")
            if not (inside_vllm and narrows):
                yield node.lineno


def test_no_check_disappears_under_o() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in PACKAGES.values()
        for path in sorted(folder.rglob("*.py"))
        if not path.name.endswith(("_pb2.py", "_pb2_grpc.py"))
        for line in _dropped(path)
    ]
    assert found == []
