"""What goes and what stays when versions are based on each other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightsync_server.catalog.garbage_collector import Retention
from weightsync_server.catalog.record import VersionRecord
from weightsync_server.store.store_records import CommitRecord

DENSE, DELTA = 1000, 10


def records(bases: dict[int, int]) -> list[VersionRecord]:
    """Return committed versions, each with the version that it is based on; 0: none."""
    made: dict[int, VersionRecord] = {}
    for version in sorted(bases):
        base = bases[version]
        commit = CommitRecord(
            "m", version, "", "", "", 1, 1, {}, DENSE, 1, 1, True, False,
            base_version=base, delta_bytes=DELTA if base else 0,
        )  # fmt: skip
        made[version] = VersionRecord.committed(commit)
        made[version].base = made.get(base)
    return list(made.values())


def numbers(found: list[VersionRecord]) -> list[int]:
    return [record.version for record in found]


def test_full_versions_go_oldest_first() -> None:
    found = Retention(2).surplus(records(dict.fromkeys(range(1, 6), 0)), lambda _: False)
    assert sorted(numbers(found.doomed)) == [1, 2, 3]
    assert found.carried == []


def test_what_a_kept_delta_is_based_on_stays() -> None:
    chain = records({1: 0, 2: 1, 3: 2, 4: 0, 5: 3})
    found = Retention(1).surplus(chain, lambda _: False)
    assert numbers(found.doomed) == [4]
    assert numbers(found.carried) == [1, 2, 3]


def test_a_delta_goes_before_its_base() -> None:
    found = Retention(1).surplus(records({1: 0, 2: 1, 3: 2, 4: 0}), lambda _: False)
    assert numbers(found.doomed) == [3, 2, 1]


def test_bytes_are_those_that_are_kept() -> None:
    chain = records({1: 0, **{version: version - 1 for version in range(2, 9)}})
    within = Retention(100, DENSE + 7 * DELTA).surplus(chain, lambda _: False)
    assert (within.doomed, within.full) == ([], False)
    over = Retention(100, DENSE + 6 * DELTA).surplus(chain, lambda _: False)
    assert (over.doomed, over.full) == ([], True)


def test_the_newest_is_to_be_kept_in_full_when_that_lets_others_go() -> None:
    chain = records({1: 0, **{version: version - 1 for version in range(2, 9)}})
    found = Retention(2).surplus(chain, lambda _: False)
    assert len(found.carried) == 6
    assert found.weighs_on(chain[-1], 5)
    assert not found.weighs_on(chain[-1], 6)
    # Over the limit in bytes: worth it as soon as more goes than comes.
    tight = Retention(2, DENSE).surplus(chain, lambda _: False)
    assert tight.weighs_on(chain[-1], 100)
    two = records({1: 0, 2: 1})
    assert not Retention(1, DENSE).surplus(two, lambda _: False).weighs_on(two[-1], 100)


@given(
    st.lists(st.integers(0, 11), min_size=1, max_size=12),
    st.integers(1, 6),
    st.sets(st.integers(1, 12)),
)
def test_no_chain_is_ever_broken(bases: list[int], keep: int, kept: set[int]) -> None:
    told = {at: base if base < at else 0 for at, base in enumerate(bases, 1)}
    chain = records(told)
    found = Retention(keep).surplus(chain, lambda record: record.version in kept)
    left = [record for record in chain if record not in found.doomed]
    assert all(base in left for record in left for base in record.chain)
    assert not kept & set(numbers(found.doomed))
    # One after the other, too: nothing goes while something is based on it.
    gone: list[VersionRecord] = []
    for record in found.doomed:
        assert all(other in gone for other in chain if other.base is record)
        gone.append(record)
