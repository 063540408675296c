"""Checks of the house that no linter has: sizes and names of files, classes and words.

Usage: python scripts/house.py [--write]

scripts/house.json lists what is known to break a check; an entry that is needed no more is a
failure too, so that the list only gets shorter. --write writes the list anew, for a move.
"""

from __future__ import annotations

import ast
import json
import re
import sys
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
from functools import cache

ROOT = Path(__file__).resolve().parents[1]
ALLOWED = Path(__file__).with_name("house.json")
PACKAGES = ("weightsync", "server/weightsync_server", "client/weightsync_client")
#: Lines of a file that needs no reason, and of any.
PLAIN_LINES, MOST_LINES, MOST_ATTRIBUTES = 600, 900, 16
#: How the docstring of a longer file says why it is one.
REASON = "One file: "
#: Words that names do not use, and what the field says.
WORDS = {
    "told": "reported, declared",
    "telling": "reporting",
    "lent": "leased",
    "lending": "same_host",
    "lender": "offers",
    "desk": "session, listener",
    "lying": "placed",
    "lies": "placement",
    "doubts": "unproved",
    "crew": "pool",
    "errands": "tasks",
    "motion": "transfer",
    "aside": "backup",
    "beside": "next_to",
    "parcel": "batch",
    "held": "paused, leased, existing",
}
#: Modules that turn the words of a wire or a file, which stay for ever, into ours.
CODECS = frozenset({"same_host"})
#: Public in two places on purpose.
DOUBLE_CLASSES = frozenset({"EngineState"})
#: Results and bundles, which have as many fields as there is to tell.
WIDE_CLASSES = frozenset(
    {"ApplyRecord", "Version", "PushOptions", "PushResult", "CommitRecord", "Model", "ModelStatus"}
)
#: A smaller module that only its own room imports belongs into the module that imports it.
LEAST_LINES = 60
#: Where a wait that grows is reckoned.
BACKOFF = "weightsync/backoff.py"
#: Where the fields of a version's record change.
RECORD = "server/weightsync_server/catalog/record.py"


def _sources() -> Iterator[tuple[str, Path]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            if not path.stem.endswith(("_pb2", "_pb2_grpc")):
                yield package, path


def _module(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[parts[0] in ("server", "client") :])


def _words(tree: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        for field in ("id", "attr", "arg", "name", "asname", "module"):
            value = getattr(node, field, None)
            if isinstance(value, str):
                names.add(value)
    parts = {part.lower() for name in names for part in re.findall(r"[A-Z]?[a-z]+", name)}
    return parts & WORDS.keys()


def _attributes(node: ast.ClassDef) -> int:
    """Return how many attributes its instances get: fields, and what `__init__` assigns."""
    found = {
        part.target.id
        for part in node.body
        if isinstance(part, ast.AnnAssign)
        and isinstance(part.target, ast.Name)
        and "ClassVar" not in ast.unparse(part.annotation)
    }
    for part in node.body:
        if isinstance(part, ast.FunctionDef) and part.name == "__init__":
            found |= {target.attr for target in _assigned(part) if _owner(target) == "self"}
    return len(found)


def _assigned(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Return every attribute that something is assigned to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node


def _owner(target: ast.Attribute) -> str:
    """Return the last name of what has an attribute: `record` of `self._push.record.slot`."""
    value = target.value
    return value.id if isinstance(value, ast.Name) else getattr(value, "attr", "").lstrip("_")


def _annotated(tree: ast.AST) -> Iterator[str]:
    """Return the names of what a module says is a version's record."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arg | ast.AnnAssign) and node.annotation:
            text = ast.unparse(node.annotation).strip("'\"")
            if text.removesuffix(" | None") == "VersionRecord":
                name = node.arg if isinstance(node, ast.arg) else ast.unparse(node.target)
                yield name.rpartition(".")[2].lstrip("_")


@cache
def _record_names() -> tuple[frozenset[str], frozenset[str]]:
    """Return what anybody calls a version's record, and the fields of one."""
    trees = {path: ast.parse(path.read_text()) for _, path in _sources()}
    fields = {
        part.target.id
        for node in trees[ROOT / RECORD].body
        if isinstance(node, ast.ClassDef) and node.name == "VersionRecord"
        for part in node.body
        if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name)
    }
    names = {name for tree in trees.values() for name in _annotated(tree)}
    return frozenset(names), frozenset(fields)


def _foreign(name: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Return what a module writes into objects of another one."""
    names, fields = _record_names()
    knows = any(
        isinstance(node, ast.alias) and node.name == "VersionRecord" for node in ast.walk(tree)
    )
    for target in _assigned(tree):
        owner = _owner(target)
        ours = owner == "record" or (knows and owner in names and target.attr in fields)
        if ours and name.startswith("server/") and name != RECORD:
            yield f"record {name} {target.attr}", f"have a method of {RECORD} change it"
        elif target.attr.startswith("on_") and _owner(target) != "self":
            yield f"callback {name} {target.attr}", "give it when the object is made"


def _backoffs(name: str, tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Return the classes of a module that are a home of growing waits beside the one there is."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef) and "backoff" in node.name.lower() and name != BACKOFF:
            yield f"backoff {name} {node.name}", f"take what {BACKOFF} has, or add it there"


def _imported(tree: ast.AST) -> set[str]:
    return {
        node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
    }


def findings() -> dict[str, str]:
    """Return what breaks a check: a key that stays the same from run to run, and the remedy."""
    found: dict[str, str] = {}
    files: dict[tuple[str, str], list[str]] = defaultdict(list)
    classes: dict[str, list[str]] = defaultdict(list)
    importers: dict[str, set[str]] = defaultdict(set)
    small: dict[str, str] = {}
    for package, path in _sources():
        name = str(path.relative_to(ROOT))
        text = path.read_text()
        tree = ast.parse(text, name)
        module = _module(path)
        for other in _imported(tree):
            importers[other].add(module)
        found |= dict(_foreign(name, tree)) | dict(_backoffs(name, tree))
        if path.stem not in ("__init__", "__main__"):
            files[package, path.stem].append(name)
            if text.count("\n") < LEAST_LINES and "Protocol" not in text:
                small[module] = name
        reason = REASON in (ast.get_docstring(tree) or "")
        if (lines := text.count("\n")) > (MOST_LINES if reason else PLAIN_LINES):
            found[f"long {name}"] = (
                f"{lines} lines, at most {PLAIN_LINES}, or {MOST_LINES} where its docstring says "
                f"why ({REASON!r}): split it by idea"
            )
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                if not node.name.startswith("_") and node.name not in DOUBLE_CLASSES:
                    classes[node.name].append(name)
                if node.name in WIDE_CLASSES:
                    continue
                if (count := _attributes(node)) > MOST_ATTRIBUTES:
                    found[f"attributes {name} {node.name}"] = (
                        f"{count} attributes, at most {MOST_ATTRIBUTES}: take a part out of it"
                    )
        if path.stem not in CODECS:
            for word in sorted(_words(tree)):
                found[f"word {name} {word}"] = f"no name says so; say {WORDS[word]}"
    for module, name in small.items():
        room = module.rpartition(".")[0]
        who = importers[module] - {f"{room}.__init__"}
        if len(who) == 1 and {one.rpartition(".")[0] for one in who} == {room}:
            found[f"small {name}"] = (
                f"under {LEAST_LINES} lines, for {min(who)} alone: move it there"
            )
    for (_, stem), names in files.items():
        if len(names) > 1:
            found[f"file {stem}"] = f"{' and '.join(names)}: name each after what is in it"
    for class_name, names in classes.items():
        if len(names) > 1:
            found[f"class {class_name}"] = f"{' and '.join(names)}: give each a name of its own"
    return found


def main(arguments: list[str]) -> int:
    """Return 0 if nothing but the known is found, and all of that."""
    found = findings()
    if "--write" in arguments:
        ALLOWED.write_text(json.dumps(sorted(found), indent=1) + "\n")
        return 0
    allowed = set(json.loads(ALLOWED.read_text()))
    for key in sorted(found.keys() - allowed):
        print(f"{key}: {found[key]}")
    for key in sorted(allowed - found.keys()):
        print(f"{key}: is mended; remove it from {ALLOWED.relative_to(ROOT)}")
    return min(1, len(found.keys() ^ allowed))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
