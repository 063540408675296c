"""Boxes cover a tensor when each of its elements is in one of them."""

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest

from weightsync.model.tensor_slices import Box, problem_of


def _rows(*ends: int, columns: int = 4) -> list[Box]:
    return [Box((a, 0), (b - a, columns)) for a, b in itertools.pairwise((0, *ends))]


@pytest.mark.parametrize(
    ("shape", "boxes"),
    [
        ((6, 4), _rows(2, 5, 6)),
        # A rank may hold nothing.
        ((6, 4), [*_rows(2, 6), Box((6, 0), (0, 4))]),
        ((6, 4), [Box((0, 0), (6, 1)), Box((0, 1), (2, 3)), Box((2, 1), (4, 3))]),
        # No line parts these five from side to side.
        (
            (3, 3),
            [
                Box((0, 0), (1, 2)),
                Box((0, 2), (2, 1)),
                Box((2, 1), (1, 2)),
                Box((1, 0), (2, 1)),
                Box((1, 1), (1, 1)),
            ],
        ),
        ((), [Box((), ())]),
        ((0, 4), [Box((0, 0), (0, 4))]),
        ((0, 4), []),
    ],
)
def test_a_cover_has_no_problem(shape: tuple[int, ...], boxes: list[Box]) -> None:
    assert problem_of(shape, boxes) == ""


@pytest.mark.parametrize(
    ("shape", "boxes", "problem"),
    [
        ((6, 4), _rows(2, 5), "4 of 24 elements are in none"),
        ((6, 4), [*_rows(2, 6), Box((1, 3), (1, 1))], r"\[0:2, 0:4\] and \[1:2, 3:4\] overlap"),
        ((6, 4), [*_rows(6), *_rows(6)], "overlap"),
        ((6, 4), _rows(7), "reaches beyond"),
        ((6, 4), [Box((-1, 0), (7, 4))], "reaches beyond"),
        ((6, 4), [Box((0, 0), (-1, 4))], "reaches beyond"),
        ((6, 4), [Box((0,), (6,))], "another number of dimensions"),
        # As many elements as there are, but one twice and one not at all.
        ((2,), [Box((0,), (1,)), Box((0,), (1,))], "overlap"),
        ((), [Box((), ()), Box((), ())], "overlap"),
        ((), [], "1 of 1 elements are in none"),
    ],
)
def test_what_is_missing_or_there_twice_is_told(
    shape: tuple[int, ...], boxes: list[Box], problem: str
) -> None:
    assert re.search(problem, problem_of(shape, boxes))


def test_every_verdict_is_that_of_counting() -> None:
    chance = random.Random(7)
    verdicts = set()
    for _ in range(3000):
        shape = tuple(chance.randint(1, 4) for _ in range(chance.randint(1, 3)))
        boxes = _cut(chance, Box((0,) * len(shape), shape), 3)
        for _ in range(chance.randint(0, 1)):
            at = chance.randrange(len(boxes))
            boxes[at] = chance.choice(boxes)
        chance.shuffle(boxes)
        counts = np.zeros(shape, int)
        for box in boxes:
            counts[box.slices] += 1
        verdicts.add(good := bool((counts == 1).all()))
        assert (problem_of(shape, boxes) == "") is good, (shape, boxes)
    assert verdicts == {True, False}


def _cut(chance: random.Random, box: Box, depth: int) -> list[Box]:
    if not depth:
        return [box]
    along = chance.randrange(len(box.sizes))
    at = chance.randint(0, box.sizes[along])
    sizes, rest, begin = list(box.sizes), list(box.sizes), list(box.offsets)
    sizes[along], rest[along] = at, box.sizes[along] - at
    begin[along] += at
    first, second = Box(box.offsets, tuple(sizes)), Box(tuple(begin), tuple(rest))
    return _cut(chance, first, depth - 1) + _cut(chance, second, depth - 1)


def test_boxes_that_lie_across_each_other_are_not_compared_for_hours() -> None:
    corners = itertools.product(range(2), repeat=13)
    boxes = [Box(corner, (1,) * 13) for corner in corners]
    assert "too many to compare" in problem_of((2,) * 13, boxes)
    grid = [Box((row, column), (1, 1)) for row in range(64) for column in range(64)]
    assert problem_of((64, 64), grid) == ""
