"""Write docs/reference/messages.md: every message in the source that people read.

python scripts/message_catalogue.py

A test compares what is committed with what this would write, so that a change of a message shows.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from weightsync.errors import Reason

__all__ = ["Message", "messages", "pages"]

ROOT = Path(__file__).resolve().parent.parent
_PAGE = ROOT / "docs" / "reference" / "messages.md"
_PACKAGES = ("weightsync", "server/weightsync_server", "client/weightsync_client")
_GENERATED = ("_pb2.py", "_pb2_grpc.py")
_LEVELS = ("critical", "error", "warning", "info")
#: Three words, of which the second or third begins small; a placeholder counts as a word.
_SENTENCE = re.compile(
    r"(?:[A-Za-z][\w'-]*|\{\w+\}|%\w)[,:;]? (?:[\w'(]+|\{\w+\})[,:;]? ?(?:[a-z(]|\{\w)"
)
#: Two, of which one may be a placeholder.
_TWO_WORDS = re.compile(r"[a-z]{2,}[,:;]? (?:[a-z(]|\{\w|%\w)|(?:\{\w+\}|%\w)[,:;]? [a-z]{2,}")
#: What these are given stands in cli.md, settings.md, metrics.md or errors.md, or is no message.
_ELSEWHERE = frozenset(
    {"AssertionError", "Argument", "Counter", "CounterMetricFamily", "Explanation", "Gauge"}
    | {"GaugeMetricFamily", "Histogram", "HistogramMetricFamily", "Info", "Option", "Summary"}
    | {"Typer", "TypeVar", "cast", "compile", "debug", "deprecated", "setting"}
)
#: Functions whose result is their argument in other words; a placeholder is named after that.
_THROUGH = frozenset(
    {"bool", "ceil", "float", "fspath", "hex", "int", "join", "len", "list", "max", "min", "repr"}
    | {"round", "set", "sorted", "str", "sum", "tuple", "type"}
)
_HEAD = """\
# Messages

<!-- Written by `make reference` from the source: change that. -->

Every text of the source that people read, as it stands there: refusals below their
[reason](errors.md), lines of the [log](logs.md) of INFO and above below their level, and all others
below the package that has them. A name in braces, or a `%` of a log, stands for a value. Sentences
may change with a release; programs read reasons, events and exit codes.

Included are the literals of at least three words in `weightsync`, `weightsync_server` and
`weightsync_client`, and shorter ones where a refusal or a line of a log is made. Many sentences are
put together of two: what is wrong, and what to do about it. Those stand here apart. Not
included are docstrings, lines below INFO, and what other pages of the reference show: the help of
[commands](cli.md) and [settings](settings.md), the remedies of [errors](errors.md), and the
[metrics](metrics.md).
"""


class Message(NamedTuple):
    """One text of the source; `kind` is a reason, a level of logs, or "": code decides that."""

    kind: str
    room: str
    text: str
    path: str
    line: int


def pages() -> dict[Path, str]:
    """Return the text of the page, by its path."""
    below: dict[str, set[str]] = defaultdict(set)
    for one in messages():
        below[one.kind or one.room].add(one.text)
    kinds = [*sorted(Reason.__members__), *_LEVELS]
    text = _HEAD
    for title, names in (
        ("Refusals", sorted(Reason.__members__)),
        ("Log", _LEVELS),
        ("Others", sorted(set(below) - set(kinds))),
    ):
        text += f"\n## {title}\n"
        for name in names:
            if name in below:
                shown = f"Lines of {name.upper()}" if name in _LEVELS else f"`{name}`"
                listed = "\n".join(sorted(below[name]))
                text += f"\n### {shown}\n\n```text\n{listed}\n```\n"
    return {_PAGE: text}


def messages() -> list[Message]:
    """Return every text, in the order of the files."""
    trees = {
        path: ast.parse(path.read_text())
        for package in _PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not path.name.endswith(_GENERATED)
    }
    helpers = _helpers(trees.values())
    return [one for path, tree in trees.items() for one in _module(path, tree, helpers)]


def _helpers(trees: Iterable[ast.Module]) -> dict[str, str]:
    """Return the reason of each function that makes refusals of one reason, by its name."""
    found: dict[str, set[str]] = defaultdict(set)
    for tree in trees:
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and _makes_errors(node):
                found[node.name].add(_only_reason(node))
    return {name: only for name, (only, *others) in found.items() if only and not others}


def _module(path: Path, tree: ast.Module, helpers: dict[str, str]) -> Iterator[Message]:
    own = {
        node.name: reason
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
        and _makes_errors(node)
        and (reason := _only_reason(node))
    }
    inside = path.relative_to(ROOT).as_posix()
    parts = inside.removeprefix("server/").removeprefix("client/").split("/")
    room = "/".join(parts[:2]).removesuffix(".py")
    for kind, text, line in _below(tree, "", helpers | own):
        yield Message(kind, room, text, inside, line)


def _below(node: ast.AST, kind: str, helpers: dict[str, str]) -> Iterator[tuple[str, str, int]]:
    if isinstance(node, ast.Assert) or _is_docstring(node):
        return
    if isinstance(node, ast.Call):
        if _called(node) in _ELSEWHERE:
            return
        kind = _kind(node, helpers) or kind
    elif isinstance(node, ast.FunctionDef):
        kind = _only_reason(node) if _makes_errors(node) else ""
    text = " ".join((_flat(node) or "").split())
    if (_TWO_WORDS if kind else _SENTENCE).search(text):
        yield kind, text, getattr(node, "lineno", 0)
    for child in ast.iter_child_nodes(node):
        if not (isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from _below(child, kind, helpers)


def _kind(node: ast.Call, helpers: dict[str, str]) -> str:
    """Return what a call makes of a text: a refusal of one reason, a line of a log, or ""."""
    function, name = node.func, _called(node)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        level = {"exception": "error", "log": "info"}.get(name, name)
        if level in _LEVELS and function.value.id.strip("_") == "logger":
            return level
    for argument in node.args:
        if isinstance(argument, ast.Attribute) and (reason := _only_reason(argument)):
            return reason
    return helpers.get(name, "")


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def _is_docstring(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _makes_errors(node: ast.FunctionDef) -> bool:
    return node.returns is not None and "Error" in ast.unparse(node.returns)


def _only_reason(node: ast.AST) -> str:
    named = {
        part.attr
        for part in ast.walk(node)
        if isinstance(part, ast.Attribute)
        and isinstance(part.value, ast.Name)
        and part.value.id == "Reason"
    }
    return named.pop() if len(named) == 1 else ""


def _flat(node: ast.AST) -> str | None:
    """Return the text of a literal, with a name in braces for each value; None: it is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else f"{{{_name(part)}}}"
        for part in node.values
    )


def _name(node: ast.AST | None) -> str:
    """Return the name in an expression that says best what its value is."""
    match node:
        case ast.FormattedValue(value=value) | ast.Subscript(value=value):
            return _name(value)
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name.strip("_")
        case ast.Call(args=[first, *_]) if _called(node) in _THROUGH:
            return _name(first)
        case ast.Call():
            return _called(node).strip("_")
        case ast.IfExp(body=ast.Constant(value=str(one)), orelse=ast.Constant(value=str(other))):
            return f"{one}|{other}"
        case _:
            inner = (_name(child) for child in ast.iter_child_nodes(node or ast.Load()))
            return next((name for name in inner if name != "..."), "...")


if __name__ == "__main__":
    for page, text in pages().items():
        page.write_text(text)
