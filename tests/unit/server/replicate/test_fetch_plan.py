"""Which versions are fetched: a short chain of deltas, else the newest in full, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.support.versions import make_version
from weightsync_server.replicate.fetch_plan import LONGEST_CHAIN, fetch_plan

if TYPE_CHECKING:
    from weightsync_server.store.store_records import CommitRecord


def record(version: int, base: int = 0, **facts: Any) -> CommitRecord:
    known: dict[str, Any] = {"content_digest": f"{version:032x}"}
    if base:
        known |= {"base_version": base, "base_content_digest": f"{base:032x}"}
    return make_version(version, **(known | facts)).record


def planned(
    versions: list[CommitRecord],
    here: set[int],
    *,
    other_shards: frozenset[int] = frozenset(),
    distrusted: frozenset[int] = frozenset(),
    wanted: int = 0,
) -> list[tuple[int, str]]:
    steps = fetch_plan(
        versions,
        max(here, default=0),
        lambda version: version.version in here,
        lambda version: version.version in here - other_shards,
        lambda version: version.version not in distrusted,
        next((version for version in versions if version.version == wanted), None),
    )
    return [(step.version.version, "delta" if step.delta else "full") for step in steps]


def chain(length: int) -> list[CommitRecord]:
    return [record(1), *(record(number, number - 1) for number in range(2, length + 2))]


def test_nothing_is_fetched_of_nothing_and_of_what_is_here() -> None:
    assert planned([], set()) == []
    assert planned([], {3}) == []
    assert planned(chain(2), {3}) == []


def test_a_version_that_is_kept_in_full_is_fetched_in_full() -> None:
    assert planned([record(1), record(2)], {1}) == [(2, "full")]


def test_the_first_one_is_fetched_in_full_whatever_it_is_kept_as() -> None:
    assert planned(chain(3), set()) == [(4, "full")]


@pytest.mark.parametrize("length", [1, 2, LONGEST_CHAIN])
def test_a_short_chain_is_fetched_delta_by_delta_oldest_first(length: int) -> None:
    expected = [(number, "delta") for number in range(2, length + 2)]
    assert planned(chain(length), {1}) == expected


def test_a_longer_chain_is_passed_over_for_the_newest_in_full() -> None:
    newest = LONGEST_CHAIN + 2
    assert planned(chain(LONGEST_CHAIN + 1), {1}) == [(newest, "full")]


def test_versions_that_no_chain_needs_are_left_out() -> None:
    versions = [record(1), record(2), record(3, 1), record(4), record(5, 3)]
    assert planned(versions, {1}) == [(3, "delta"), (5, "delta")]


def test_a_base_below_what_is_here_cannot_come_any_more() -> None:
    # Version 4 was fetched in full, and what comes must lie above it.
    versions = [record(1), record(2, 1), record(4), record(5, 2)]
    assert planned(versions, {1, 4}) == [(5, "full")]


def test_a_base_with_other_content_is_none() -> None:
    assert planned([record(1, content_digest="f" * 32), record(2, 1)], {1}) == [(2, "full")]


def test_a_base_that_the_origin_has_no_more_is_none() -> None:
    assert planned([record(3, 2)], {2}) == [(3, "full")]


def test_a_base_in_other_shards_is_none() -> None:
    # The checkpoint of the engine, in files of its own.
    assert planned(chain(2), {1}, other_shards=frozenset({1})) == [(3, "full")]
    assert planned([record(1)], {1}, other_shards=frozenset({1})) == []


def test_a_delta_that_has_failed_is_not_fetched_again() -> None:
    assert planned(chain(2), {1}, distrusted=frozenset({3})) == [(3, "full")]
    assert planned(chain(2), {1}, distrusted=frozenset({2})) == [(3, "full")]


def test_what_lies_below_all_that_is_here_is_not_fetched() -> None:
    # The origin has deleted its newest.
    assert planned([record(1), record(2)], {3}) == []


def test_one_that_is_wanted_is_fetched_below_the_newest_by_its_delta_or_in_full() -> None:
    assert planned(chain(4), {1, 5}, wanted=2) == [(2, "delta")]
    assert planned(chain(4), {1, 5}, wanted=2, distrusted=frozenset({2})) == [(2, "full")]
    # No chain brings others below what is here.
    assert planned(chain(4), {1, 5}, wanted=3) == [(3, "full")]
    assert planned(chain(4), {1, 3, 5}, wanted=3) == []


def test_one_that_is_wanted_above_all_that_is_here_comes_by_its_chain() -> None:
    assert planned(chain(4), {1}, wanted=3) == [(2, "delta"), (3, "delta")]
