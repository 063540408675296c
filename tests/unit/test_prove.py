"""The figures in the docs are those of docs/proof.json, and each has a commit."""

from __future__ import annotations

import json
import re
import subprocess
from functools import cache
from typing import TYPE_CHECKING

import pytest

from tests.prove.__main__ import run
from tests.prove.pages import PAGES, render, unproved
from tests.prove.parts import PARTS, Part, chosen
from tests.prove.proof import ROOT, Proof, Tree, read, store

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

_HASH = re.compile(r"[0-9a-f]{40}")


@pytest.fixture(scope="module")
def tree() -> Tree:
    tree = Tree()
    if not tree.whole:
        pytest.skip("this checkout has no git history")
    return tree


# What is committed.


@pytest.fixture(scope="module")
def older(tree: Tree) -> Callable[[str], bool]:
    """Return what tells whether code has changed since a commit; it asks git once for each."""
    return cache(tree.differs_from)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_pages_show_what_was_stored(page: Path, older: Callable[[str], bool]) -> None:
    shown = page.read_text()
    assert shown == render(shown, read(), older), "run `make prove-docs`"


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_figure_is_without_a_commit(page: Path) -> None:
    assert unproved(page.read_text()) == [], "give the section a `<!-- proof: page-... -->` block"


def test_every_proof_names_a_commit_of_this_history(tree: Tree) -> None:
    proofs = read()
    for name, proof in proofs.items():
        for commit in (proof.commit, *([proof.since] if proof.since else [])):
            assert _HASH.fullmatch(commit), name
            assert tree.has(commit), f"{name}: no commit {commit} in this history"
        assert proof.date, name
        assert proof.machine, name
    known = {part.name for part in PARTS}
    for name in proofs.keys() - known:
        assert proofs[name].written, f"{name} is no part, and was not written down by hand"


def test_every_part_is_a_target_of_the_makefile() -> None:
    text = (ROOT / "Makefile").read_text()
    benchmarks = re.search(r"^BENCHMARKS := (.*)$", text, re.MULTILINE)
    assert benchmarks is not None
    targets = set(re.findall(r"^([a-z-]+):", text, re.MULTILINE))
    targets |= {f"bench-{name}" for name in benchmarks[1].split()}
    for part in PARTS:
        make, silent, target, *_ = part.command.split()
        assert (make, silent) == ("make", "-s")
        assert target in targets
    assert {f"bench-{name}" for name in benchmarks[1].split()} < {part.name for part in PARTS}


# What the machinery does.


@pytest.mark.parametrize(
    ("output", "line"),
    [
        ("a\n58 of 58 caught\n", "58 of 58 caught"),
        ('kinds:\n{"violations": 0}\n', '{"violations": 0}'),
        ("5 passed in 3s\n== 2 passed in 8s ==", "5 passed in 3s; 2 passed in 8s"),
        ("=== 5 passed in 63.10s (0:01:03) ===\n", "5 passed in 63.10s (0:01:03)"),
    ],
)  # fmt: skip
def test_a_run_ends_with_a_line(output: str, line: str) -> None:
    assert Part("x", "make -s x").line(output) == line


def test_a_run_without_a_line_is_none() -> None:
    with pytest.raises(ValueError, match="no line"):
        Part("x", "make -s x").line("nothing\n{not json\n")


def test_a_part_that_fails_is_not_stored() -> None:
    assert run(Part("x", "echo 3 of 3 caught"), "c" * 40).line == "3 of 3 caught"
    with pytest.raises(ValueError, match="ended with 1"):
        run(Part("x", "sh -c 'echo 2 of 3 caught; exit 1'"), "c" * 40)


def test_parts_and_groups_are_chosen_by_name() -> None:
    soaks = ["soak-1", "soak-2", "soak-fleet", "soak-vllm"]
    assert [part.name for part in chosen("soak", gpu=False)] == soaks
    assert [part.name for part in chosen("planted", gpu=False)] == ["planted"]
    assert not any(part.group == "bench" for part in chosen("", gpu=False))
    assert {part.group for part in chosen("", gpu=True)} == {"gpu"}
    with pytest.raises(ValueError, match="no part is named plant; there are battery"):
        chosen("plant", gpu=False)


def test_what_was_stored_is_replaced_part_by_part(tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    one, two = (Proof("make x", str(n) * 40, "2026-01-01", "2 cores", f"{n}") for n in (1, 2))
    store({"a": one, "b": one}, path)
    store({"b": two}, path)
    assert read(path) == {"a": one, "b": two}


def test_a_page_shows_command_commit_and_line() -> None:
    page = "<!-- proof: soak -->\nold\n<!-- end of proof -->\n"
    line = json.dumps({"seed": 1, "violations": 0, "spread": {}})
    proof = Proof("make -s soak SEED=1", "a" * 40, "2026-01-01", "2 cores", line)
    shown = render(page, {"soak-1": proof, "other": proof}, lambda _: False)
    assert '| `make soak SEED=1` | `aaaaaaaaaa`, 2026-01-01; 2 cores | `"violations": 0` |' in shown
    assert "old" not in shown
    assert shown.count("\n| `") == 1
    assert "code has changed since" in render(page, {"soak-1": proof}, lambda _: True)
    assert render(shown, {"soak-1": proof}, lambda _: False) == shown


@pytest.mark.parametrize(
    "text", ["| 0.4 s |", "it ended with 58 of 58 caught", '"violations": 0', "537 passed"]
)
def test_a_figure_outside_of_a_block_is_found(text: str) -> None:
    page = f"## A\n\n{text}\n\n## B\n\n<!-- proof: soak -->\n{text}\n<!-- end of proof -->\n"
    assert unproved(page) == ["## A"]


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    for name, text in {
        "docs/a.md": "one",
        "weightsync/a.py": "x = 1\n",
        "tests/a.py": '"""One."""\n\nx = 1\n',
        "CHANGELOG.md": "one",
    }.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    for arguments in (
        ["init", "-q"],
        ["add", "."],
        ["-c", "user.name=x", "-c", "user.email=x@x", "commit", "-qm", "One"],
    ):
        subprocess.run(["git", *arguments], cwd=tmp_path, check=True)
    return tmp_path


def test_only_texts_may_differ_from_what_was_proved(repository: Path) -> None:
    tree = Tree(repository)
    commit = tree.commit()
    (repository / "docs" / "a.md").write_text("two")
    (repository / "CHANGELOG.md").write_text("two")
    (repository / "tests" / "a.py").write_text('"""Two."""\n\n# Why.\nx = 1\n')
    assert tree.changed_since(commit) == []
    assert tree.commit() == commit
    (repository / "tests" / "a.py").write_text('"""One."""\n\nx = 2\n')
    assert tree.changed_since(commit) == ["tests/a.py"]
    (repository / "weightsync" / "a.py").write_text("x = 1  # why\n")
    (repository / "weightsync" / "b.py").write_text("")
    assert tree.changed_since(commit) == ["tests/a.py", "weightsync/a.py", "weightsync/b.py"]
    with pytest.raises(ValueError, match="commit first"):
        tree.commit()


def test_a_copy_without_history_tells_nothing(tmp_path: Path) -> None:
    tree = Tree(tmp_path)
    assert not tree.known
    assert not tree.whole
