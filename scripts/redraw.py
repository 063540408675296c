"""Moves and merges modules, and rewrites whoever names them: python scripts/redraw.py TABLE.

A tool for the length of a redraw. Each line of the table makes one module of others:

    weightsync.vllm.plugin <- weightsync.vllm.plugin, weightsync.vllm.reserved_room

The code of a module that another one of the line imports comes before it; the docstring is that of
the first. A private name that two of them have must be renamed first, which the tool says. What
names the modules by dots or slashes (imports, patches of tests, plants, contracts, pages) is
rewritten. Nothing is changed where something is wrong with a line.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

ROOT = Path(__file__).resolve().parents[1]
_ROOTS = {"weightsync_server": "server", "weightsync_client": "client"}
_NAMED_IN = ("*.py", "*.pyi", "*.toml", "*.md", "*.json", "*.yml", "*.yaml", "*.sh", "Makefile")
#: What each module may have for itself, and a merged one has once.
_ONCE = ("logger", "__all__")
_WIDTH = 100


class Merge(NamedTuple):
    """One line of the table: a module, and those that it is made of."""

    target: str
    sources: tuple[str, ...]


class Source(NamedTuple):
    """A module in parts: its docstring, what it imports, and the rest of its text."""

    name: str
    docstring: str
    imports: tuple[ast.stmt, ...]
    typing: tuple[ast.stmt, ...]
    public: tuple[str, ...]
    logger: str
    body: str
    defined: frozenset[str]


def module_path(name: str) -> Path:
    """Return the file of a module, there or not."""
    parts = name.split(".")
    base = ROOT / _ROOTS.get(parts[0], ".")
    folder = base.joinpath(*parts)
    return folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")


def read_table(text: str) -> list[Merge]:
    """Return the lines of a table; `#` begins a comment."""
    merges = []
    for line in text.splitlines():
        target, arrow, sources = line.partition("#")[0].partition("<-")
        if arrow:
            merges.append(Merge(target.strip(), tuple(name.strip() for name in sources.split(","))))
    return merges


def read_source(name: str) -> Source:
    """Take a module apart."""
    text = module_path(name).read_text()
    tree, lines = ast.parse(text), text.splitlines(keepends=True)
    imports: list[ast.stmt] = []
    typing: list[ast.stmt] = []
    public: list[str] = []
    logger, body, done = "", [], 0
    defined: set[str] = set()
    docstring = ast.get_docstring(tree, clean=False) or ""
    for at, node in enumerate(tree.body):
        end = node.end_lineno or 0
        own = "".join(lines[done:end])
        done = end
        if at == 0 and docstring:
            continue
        if isinstance(node, ast.ImportFrom) and node.module == "__future__":
            continue
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.append(node)
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            typing += node.body
        elif names := _targets(node) & set(_ONCE):
            if "__all__" in names:
                public += ast.literal_eval(node.value)  # type: ignore[attr-defined]
            else:
                logger = own.strip()
        else:
            defined |= _targets(node)
            body.append(own)
    body.append("".join(lines[done:]))
    return Source(
        name,
        docstring,
        tuple(imports),
        tuple(typing),
        tuple(public),
        logger,
        "".join(body).strip("\n"),
        frozenset(defined),
    )


def _targets(node: ast.stmt) -> set[str]:
    """Return the names that a statement gives to something."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return {node.name}
    found = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    nodes = [one for target in found if target for one in ast.walk(target)]
    return {one.id for one in nodes if isinstance(one, ast.Name)}


def merged(merge: Merge) -> str:
    """Return the text of a module that is made of others.

    Raises:
        ValueError: Two have the same name, or import each other.
    """
    sources = _ordered([read_source(name) for name in merge.sources])
    counts = Counter(name for source in sources for name in source.defined)
    if doubled := [
        f"{name} ({', '.join(s.name for s in sources if name in s.defined)})"
        for name, count in counts.items()
        if count > 1
    ]:
        raise ValueError(f"{merge.target}: rename one of each first: {'; '.join(sorted(doubled))}")
    first = next(source for source in sources if source.name == merge.sources[0])
    imports = _statements([source.imports for source in sources], merge.sources)
    typing = _statements([source.typing for source in sources], merge.sources, set(imports))
    parts = [f'"""{first.docstring}"""\n', "from __future__ import annotations\n"]
    parts += imports
    if typing:
        parts += ["", "if TYPE_CHECKING:", *(f"    {line}" for line in typing)]
    if public := sorted({name for source in sources for name in source.public}):
        one = "__all__ = [" + ", ".join(f'"{name}"' for name in public) + "]"
        rows = "".join(f'    "{name}",\n' for name in public)
        parts += ["", one if len(one) <= _WIDTH else f"__all__ = [\n{rows}]"]
    if logger := next((source.logger for source in sources if source.logger), ""):
        parts += ["", logger]
    parts += [f"\n\n{source.body}" for source in sources]
    return "\n".join(parts) + "\n"


def _ordered(sources: list[Source]) -> list[Source]:
    """Return them with each after those that it imports."""
    left, done = list(sources), list[Source]()
    while left:
        ready = [one for one in left if not any(_imports(one, other) for other in left)]
        if not ready:
            raise ValueError(f"these import each other: {', '.join(one.name for one in left)}")
        done.append(ready[0])
        left.remove(ready[0])
    return done


def _imports(source: Source, other: Source) -> bool:
    found = (node.module for node in source.imports if isinstance(node, ast.ImportFrom))
    return other is not source and other.name in found


def _statements(
    groups: list[tuple[ast.stmt, ...]], own: tuple[str, ...], known: Collection[str] = ()
) -> list[str]:
    """Return imports, one name each and each once, without those of what is joined, and `known`."""
    found: dict[str, None] = {}
    for node in (node for group in groups for node in group):
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            found[ast.unparse(node)] = None
            continue
        module = node.module if isinstance(node, ast.ImportFrom) else None
        if module in own:
            if renamed := [name.name for name in node.names if name.asname]:
                raise ValueError(f"{module} is imported as another name: {', '.join(renamed)}")
            continue
        for name in node.names:
            if module and f"{module}.{name.name}" in own:
                raise ValueError(f"{module}.{name.name} is imported as a module by what it joins")
            start = f"from {module} " if module else ""
            found[f"{start}import {ast.unparse(name)}"] = None
    return [one for one in found if one not in known]


def rename(merges: list[Merge]) -> None:
    """Rewrite every file that names a module which has moved."""
    pairs = [(source, merge.target) for merge in merges for source in merge.sources]
    moved = {source: target for source, target in pairs if source != target}
    paths = {_shown(source): _shown(target) for source, target in moved.items()}
    names, files = _any_of(moved, r"\b"), _any_of(paths, "")
    command = ["git", "ls-files", "-co", "--exclude-standard", *_NAMED_IN]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for path in map(ROOT.joinpath, listed.stdout.split()):
        if not path.is_file() or path.resolve() == Path(__file__).resolve():
            continue
        old = path.read_text()
        new = names.sub(lambda match: moved[match[0]], old)
        new = files.sub(lambda match: paths[match[0]], new)
        if path.suffix == ".py":
            new = _module_imports(new, moved)
        if new != old:
            path.write_text(new)


def _any_of(names: Iterable[str], end: str) -> re.Pattern[str]:
    longest_first = sorted(names, key=len, reverse=True)
    return re.compile("|".join(rf"\b{re.escape(name)}{end}" for name in longest_first))


def _shown(name: str) -> str:
    return "/".join((*filter(None, [_ROOTS.get(name.partition(".")[0])]), *name.split("."))) + ".py"


def _module_imports(text: str, moved: dict[str, str]) -> str:
    """Rewrite `from room import module`, whose name the code goes on to use."""
    lines = text.splitlines(keepends=True)
    found = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom)]
    for node in sorted(found, key=lambda node: -node.lineno):
        gone = [name for name in node.names if f"{node.module}.{name.name}" in moved]
        if not gone:
            continue
        indent = " " * node.col_offset
        rest = [name for name in node.names if name not in gone]
        kept = ", ".join(ast.unparse(name) for name in rest)
        new = [f"{indent}from {node.module} import {kept}\n"] if rest else []
        for name in gone:
            room, _, module = moved[f"{node.module}.{name.name}"].rpartition(".")
            known_as = name.asname or name.name
            alias = f" as {known_as}" if known_as != module else ""
            new.append(f"{indent}from {room} import {module}{alias}\n")
        lines[node.lineno - 1 : node.end_lineno] = new
    return "".join(lines)


def main(arguments: list[str]) -> int:
    """Do what a table says."""
    merges = read_table(Path(arguments[0]).read_text())
    try:
        texts = {merge.target: merged(merge) for merge in merges}
    except (ValueError, OSError) as error:
        print(error)
        return 1
    for merge in merges:
        first, *others = (module_path(name) for name in merge.sources)
        target = module_path(merge.target)
        target.parent.mkdir(parents=True, exist_ok=True)
        if first != target:
            subprocess.run(["git", "mv", "-f", str(first), str(target)], check=True)
        target.write_text(texts[merge.target])
        for path in others:
            if path != target:
                path.unlink()
    rename(merges)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
