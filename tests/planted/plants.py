"""Planted bugs: edits that each break one invariant, and the tests that must notice.

Every invariant has a file of them, such as `no_leak.toml`:

    [[plant]]
    name = "a_segment_stays_open"
    bug = "The memory of a retired segment is never given back."
    tests = ["tests/unit/server/residency/test_slots.py::test_all_memory_and_descriptors_come_back"]

    [[plant.edits]]
    file = "server/weightsync_server/residency/segment_allocator.py"
    old = '''
            await asyncio.get_running_loop().run_in_executor(None, segment.close)
    '''
    new = '''
            self._kept = [*getattr(self, "_kept", []), segment]
    '''

`old` occurs exactly once in its file: whole lines, and no more of them than that takes, so that a
plant fits until that very code changes.
"""

from __future__ import annotations

import shutil
import tomllib
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["ROOT", "Edit", "Plant", "copy_tree", "plants"]

ROOT = Path(__file__).parents[2]
_FOLDER = Path(__file__).parent
#: What the tests need of the tree.
_PARTS = ("weightsync", "server", "client", "tests", "protos", "pyproject.toml")


@dataclass(frozen=True)
class Edit:
    """One place that a bug changes.

    Attributes:
        file: Its path in the tree.
        old: A text that occurs exactly once in the file.
        new: What stands there instead.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Plant:
    """One bug.

    Attributes:
        name: Invariant and name, such as `no_leak/a_segment_stays_open`.
        invariant: One of the server's `INVARIANTS`.
        bug: What is wrong, one sentence.
        tests: The tests of which at least one must fail.
        edits: How it comes about, in this order.
    """

    name: str
    invariant: str
    bug: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]

    def edited(self, tree: Path) -> dict[str, str]:
        """Return the text of each file that it changes, with the bug; nothing is written.

        Raises:
            ValueError: An edit does not fit the tree any more.
        """
        texts: dict[str, str] = {}
        for edit in self.edits:
            if not (tree / edit.file).exists():
                raise ValueError(f"{self.name} does not fit: there is no file {edit.file}")
            text = texts.get(edit.file) or (tree / edit.file).read_text()
            if (count := text.count(edit.old)) != 1:
                found = f"occurs {count} times" if count else "is absent"
                raise ValueError(
                    f"{self.name} does not fit {edit.file}: this text {found}, and must occur "
                    f"once:\n{edit.old}"
                )
            texts[edit.file] = text.replace(edit.old, edit.new)
        return texts

    @contextmanager
    def apply(self, tree: Path) -> Iterator[None]:
        """Change a copy of the tree until the block ends.

        Sizes and seconds of its files, by which Python judges bytecode, may be those of another
        bug: whoever runs the code must write none (PYTHONDONTWRITEBYTECODE).

        Raises:
            ValueError: The plant does not fit the tree any more; nothing is changed.
        """
        texts = self.edited(tree)
        before = {file: (tree / file).read_text() for file in texts}
        try:
            _write(tree, texts)
            yield
        finally:
            _write(tree, before)


def _write(tree: Path, texts: dict[str, str]) -> None:
    for file, text in texts.items():
        (tree / file).write_text(text)


def plants() -> list[Plant]:
    """Return all planted bugs: by invariant, and as they follow each other in its file."""
    return [plant for path in sorted(_FOLDER.glob("*.toml")) for plant in _read(path)]


def _read(path: Path) -> Iterator[Plant]:
    for facts in tomllib.loads(path.read_text())["plant"]:
        yield Plant(
            name=f"{path.stem}/{facts['name']}",
            invariant=path.stem,
            bug=facts["bug"],
            tests=tuple(facts["tests"]),
            edits=tuple(Edit(**edit) for edit in facts["edits"]),
        )


def copy_tree(target: Path) -> None:
    """Copy what the tests need, without caches."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc")
    for part in _PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, target / part, ignore=ignored)
        else:
            shutil.copy2(source, target / part)
