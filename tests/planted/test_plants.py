"""The planted bugs themselves: each fits the tree, and every invariant has three or more."""

from __future__ import annotations

import ast
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.planted.__main__ import try_plant
from tests.planted.plants import ROOT, Edit, Plant, plants
from weightsync_server.ops.metrics import INVARIANTS

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_every_invariant_has_three_or_more() -> None:
    counts = Counter(plant.invariant for plant in plants())
    assert counts.keys() == set(INVARIANTS)
    assert min(counts.values()) >= 3


def test_no_name_is_used_twice() -> None:
    counts = Counter(plant.name for plant in plants())
    assert [name for name, count in counts.items() if count > 1] == []


def test_every_plant_fits_the_tree_and_its_tests_exist() -> None:
    """One test for all: that of each takes less time than pytest takes for a test."""
    problems = [problem for plant in plants() for problem in _problems(plant)]
    assert not problems, "\n".join(problems)


def _problems(plant: Plant) -> Iterator[str]:
    try:
        texts = plant.edited(ROOT)
    except ValueError as error:
        texts = {}
        yield str(error)
    for file, text in texts.items():
        # What cannot be imported fails every test, and proves nothing of any.
        try:
            ast.parse(text)
        except SyntaxError as error:
            yield f"{plant.name} makes {file} something else than Python: {error}"
    if not plant.bug.endswith("."):
        yield f"{plant.name}: its bug is no sentence: {plant.bug}"
    for test in plant.tests:
        file, _, name = test.partition("::")
        source = (ROOT / file).read_text() if (ROOT / file).exists() else ""
        if (f"def {name}(" if name else "def test_") not in source:
            yield f"{plant.name}: there is no test {test}"


NUMBER = "number = 1\nother = 2\nother = 2\n"
TEST = """\
from number import number
import pytest

@pytest.mark.parametrize("sign", ["plus - minus"])
def test_it_is_one(sign):
    assert number == 1

def test_it_is_a_number():
    assert number
"""


def _plant(*edits: tuple[str, str], test: str = "tests/test_number.py") -> Plant:
    changes = tuple(Edit("number.py", old, new) for old, new in edits)
    return Plant("bounded/wrong", "bounded", "The number is wrong.", (test,), changes)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "number.py").write_text(NUMBER)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_number.py").write_text(TEST)
    return tmp_path


@pytest.mark.parametrize(
    ("old", "found"), [("never there\n", "is absent"), ("other = 2\n", "occurs 2 times")]
)
def test_a_plant_that_does_not_fit_is_an_error_and_changes_nothing(
    tree: Path, old: str, found: str
) -> None:
    wrong = _plant(("number = 1\n", "number = 2\n"), (old, ""))
    message = f"bounded/wrong does not fit number.py: this text {found}, .*\n{old}"
    with pytest.raises(ValueError, match=message), wrong.apply(tree):
        pass
    assert (tree / "number.py").read_text() == NUMBER


def test_a_plant_of_a_file_that_is_gone_is_an_error(tree: Path) -> None:
    (tree / "number.py").unlink()
    with pytest.raises(ValueError, match=r"bounded/wrong does not fit: .* number\.py"):
        _plant(("number = 1\n", "")).edited(tree)


def test_a_plant_is_there_until_its_block_ends(tree: Path) -> None:
    plant = _plant(("number = 1\n", "number = 2\n"), ("number = 2\nother", "number = 3\nother"))
    with plant.apply(tree):
        assert (tree / "number.py").read_text() == NUMBER.replace("number = 1", "number = 3")
    assert (tree / "number.py").read_text() == NUMBER
    with pytest.raises(FileNotFoundError), plant.apply(tree):
        (tree / "gone").read_text()
    assert (tree / "number.py").read_text() == NUMBER


def test_the_first_test_that_fails_is_told(tree: Path) -> None:
    outcome = try_plant(_plant(("number = 1\n", "number = 0\n")), tree)
    assert outcome.record() == {
        "name": "bounded/wrong",
        "invariant": "bounded",
        "caught": True,
        "by": "tests/test_number.py::test_it_is_one[plus - minus]",
        "seconds": round(outcome.seconds, 2),
    }
    assert str(outcome).endswith(f": caught by {outcome.by}")


def test_what_no_test_notices_is_not_caught(tree: Path) -> None:
    unseen = _plant(
        ("number = 1\n", "number = 2\n"), test="tests/test_number.py::test_it_is_a_number"
    )
    outcome = try_plant(unseen, tree)
    assert (outcome.by, outcome.problem) == ("", "")
    assert str(outcome).endswith(": NOT CAUGHT")


def test_what_keeps_pytest_from_running_is_not_caught(tree: Path) -> None:
    outcome = try_plant(_plant(("number = 1\n", "")), tree)
    assert not outcome.by
    assert "cannot import name 'number'" in outcome.problem
