"""Planted bugs: patches that each break one invariant, and the tests that must notice."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ROOT", "Plant", "copy_tree", "plants"]

ROOT = Path(__file__).parents[2]
_FOLDER = Path(__file__).parent
#: What the tests need of the tree.
_PARTS = ("weightsync", "server", "client", "tests", "protos", "pyproject.toml")


@dataclass(frozen=True)
class Plant:
    """One bug.

    Attributes:
        name: Invariant and file, such as `no_leak/a_segment_stays_open`.
        invariant: One of the server's `INVARIANTS`.
        bug: What is wrong, one sentence.
        tests: The tests of which at least one must fail.
        patch: The unified patch.
    """

    name: str
    invariant: str
    bug: str
    tests: tuple[str, ...]
    patch: Path

    def apply(self, tree: Path, *, undo: bool = False, check: bool = False) -> None:
        """Change a copy of the tree, or put it back.

        Raises:
            ValueError: The patch does not fit the tree any more.
        """
        flags = [*(["--reverse"] if undo else []), *(["--check"] if check else [])]
        done = subprocess.run(
            # A tree inside somebody's repository must not be taken for a part of it.
            ["git", "apply", *flags, str(self.patch)],
            cwd=tree,
            env={"GIT_DIR": "/nonexistent", "PATH": _path()},
            capture_output=True,
            check=False,
        )
        if done.returncode:
            msg = f"{self.name} does not apply: {done.stderr.decode(errors='replace').strip()}"
            raise ValueError(msg)


def _path() -> str:
    git = shutil.which("git")
    if git is None:
        msg = "git is not installed (Debian package git); it applies the patches"
        raise ValueError(msg)
    return str(Path(git).parent)


def plants() -> list[Plant]:
    """Return all planted bugs, by invariant and name."""
    return [_read(path) for path in sorted(_FOLDER.glob("*/*.patch"))]


def _read(path: Path) -> Plant:
    head: dict[str, list[str]] = {}
    for line in path.read_text().split("\n--- a/")[0].splitlines():
        key, _, value = line.partition(": ")
        head.setdefault(key, []).append(value)
    return Plant(
        name=f"{path.parent.name}/{path.stem}",
        invariant=head["Invariant"][0],
        bug=head["Bug"][0],
        tests=tuple(head["Test"]),
        patch=path,
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
