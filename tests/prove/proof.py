"""docs/proof.json: what was run, on which commit and machine, and the line that it ended with."""

from __future__ import annotations

import ast
import json
import os
import platform
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["PROOF", "ROOT", "Proof", "Tree", "machine", "read", "store"]

ROOT = Path(__file__).parents[2]
PROOF = ROOT / "docs" / "proof.json"

#: Who reads them runs nothing of them.
_TEXTS = ("docs/", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "README.md")


@dataclass(frozen=True)
class Proof:
    """One run of a part, or figures that were measured before there were parts.

    Attributes:
        command: What was typed.
        commit: What was measured, 40 hexadecimal digits.
        date: When, year-month-day.
        machine: Cores, memory, processor, GPU.
        line: What the command ended with; empty: the page itself holds the figures.
        written: Whether `commit` is the one that wrote the figures into the docs: then the code
            that was measured is that of this commit or a little older.
        since: Where figures of several commits stand together, the oldest of these.
    """

    command: str
    commit: str
    date: str
    machine: str
    line: str = ""
    written: bool = False
    since: str = ""


def read(path: Path = PROOF) -> dict[str, Proof]:
    """Return every proof by the name of its part."""
    if not path.exists():
        return {}
    return {name: Proof(**facts) for name, facts in json.loads(path.read_text()).items()}


def store(proofs: dict[str, Proof], path: Path = PROOF) -> None:
    """Put these proofs into the file, in the place of older ones of the same parts."""
    found = {name: asdict(proof) for name, proof in (read(path) | proofs).items()}
    path.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")


class Tree:
    """The repository of this checkout.

    Attributes:
        known: Whether there is one; a copy on a host with GPUs may have none.
        whole: Whether its history is there; in a shallow clone nobody can tell how old a proof is.
    """

    def __init__(self, root: Path = ROOT) -> None:
        self._root = root
        self.known = shutil.which("git") is not None and (root / ".git").exists()
        shallow = self.known and self._git("rev-parse", "--is-shallow-repository").strip()
        self.whole = shallow == "false"

    def commit(self) -> str:
        """Return the commit that is checked out.

        Raises:
            ValueError: Code differs from it; what is proved must have a name.
        """
        head = self._git("rev-parse", "HEAD").strip()
        if changed := self.changed_since(head):
            raise ValueError(f"commit first, so that what is proved has a name: {changed[0]}")
        return head

    def has(self, commit: str) -> bool:
        """Whether a commit is in this history."""
        return commit in self._history

    @cached_property
    def _history(self) -> frozenset[str]:
        return frozenset(self._git("rev-list", "HEAD").split())

    def differs_from(self, commit: str) -> bool:
        """Tell whether the code of any file differs from a commit."""
        return any(True for _ in self._differing(commit))

    def changed_since(self, commit: str) -> list[str]:
        """Return the files whose code differs from a commit: not texts, nor comments of tests."""
        return list(self._differing(commit))

    def _differing(self, commit: str) -> Iterator[str]:
        told = self._git("diff", "--name-only", "-z", "--no-renames", commit).split("\0")
        told += self._git("ls-files", "--others", "--exclude-standard", "-z").split("\0")
        for path in told:
            if path and not path.startswith(_TEXTS) and not self._same_test(commit, path):
                yield path

    def _same_test(self, commit: str, path: str) -> bool:
        file = self._root / path
        if not path.startswith("tests/") or not path.endswith(".py") or not file.exists():
            return False
        try:
            before = self._git("show", f"{commit}:{path}")
        except subprocess.CalledProcessError:
            return False
        return _code(before) == _code(file.read_text())

    def _git(self, *arguments: str) -> str:
        done = subprocess.run(
            ["git", *arguments], cwd=self._root, check=True, capture_output=True, text=True
        )
        return done.stdout


def _code(text: str) -> str:
    tree = ast.parse(text)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                first.value.value = ""
    return ast.dump(tree)


def machine() -> str:
    """Return what this machine is, for people: cores, memory, processor and GPUs."""
    facts = [f"{len(os.sched_getaffinity(0))} cores"]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    facts.append(f"{memory / 2**30:.0f} GiB")
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    facts.append(names[0] if names else platform.machine())
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        facts += done.stdout.splitlines()
    return ", ".join(facts)
