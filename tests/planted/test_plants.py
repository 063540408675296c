"""The planted bugs themselves: each fits the tree, and every invariant has three or more."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.planted.plants import ROOT, Plant, copy_tree, plants
from weightsync_server.ops.metrics import INVARIANTS

if TYPE_CHECKING:
    from pathlib import Path


def test_every_invariant_has_three_or_more() -> None:
    counts = Counter(plant.invariant for plant in plants())
    assert counts.keys() == set(INVARIANTS)
    assert min(counts.values()) >= 3
    assert all(plant.name.startswith(f"{plant.invariant}/") for plant in plants())


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tree")
    copy_tree(folder)
    return folder


@pytest.mark.parametrize("plant", plants(), ids=lambda plant: plant.name)
def test_it_applies_and_its_tests_exist(plant: Plant, tree: Path) -> None:
    plant.apply(tree, check=True)
    assert plant.bug.endswith(".")
    for test in plant.tests:
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text()
        assert not name or f"def {name}(" in text, test


def test_a_patch_that_does_not_fit_is_an_error(tree: Path, tmp_path: Path) -> None:
    good = plants()[0]
    wrong = tmp_path / "wrong.patch"
    wrong.write_text(good.patch.read_text().replace("\n-", "\n-never there "))
    with pytest.raises(ValueError, match="does not apply"):
        Plant(good.name, good.invariant, good.bug, good.tests, wrong).apply(tree, check=True)
