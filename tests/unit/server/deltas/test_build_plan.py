"""Which way to make a version is chosen."""

from __future__ import annotations

import pytest

from weightsync_server.deltas.materializer import BuildStart, ChainLink, Plan, plan

SIZE = 10_000_000


def link(version: int, **facts: object) -> ChainLink:
    """Return a version of 10 MB, kept as a delta of 10 kB, in no slot."""
    told = {"delta_bytes": 10_000, "resident": False, "readable": True, **facts}
    return ChainLink(f"v{version}", SIZE, **told)  # type: ignore[arg-type]


FULL = {"delta_bytes": 0}


@pytest.mark.parametrize(
    ("chain", "remains", "expected"),
    [
        ([link(1, **FULL)], "", Plan(BuildStart.LOAD, 0)),
        ([link(1, **FULL)], "v1", Plan(BuildStart.IN_PLACE, 0)),
        ([link(1, **FULL, resident=True)], "", Plan(BuildStart.COPY, 0)),
        ([link(3), link(2), link(1, **FULL)], "", Plan(BuildStart.LOAD, 2)),
        ([link(3), link(2), link(1, **FULL)], "v1", Plan(BuildStart.IN_PLACE, 2)),
        ([link(3), link(2), link(1, **FULL)], "other", Plan(BuildStart.LOAD, 2)),
        # The version before the base lies in the slot, the base in another one.
        ([link(3), link(2, resident=True), link(1, **FULL)], "v1", Plan(BuildStart.IN_PLACE, 2)),
        ([link(3), link(2, resident=True), link(1, **FULL)], "", Plan(BuildStart.COPY, 1)),
        # Large deltas: a copy of the base is cheaper than the way from the one before it.
        (
            [link(3, delta_bytes=10), link(2, delta_bytes=1 << 20, resident=True), link(1, **FULL)],
            "v1",
            Plan(BuildStart.COPY, 1),
        ),
        # What is resident saves the disk, what is nearer saves patches.
        (
            [link(4), link(3, resident=True), link(2, resident=True), link(1, **FULL)],
            "",
            Plan(BuildStart.COPY, 1),
        ),
    ],
)
def test_the_cheapest_way_is_taken(chain: list[ChainLink], remains: str, expected: Plan) -> None:
    assert plan(chain, remains) == expected


def test_damage_below_a_resident_version_does_no_harm() -> None:
    lost = link(1, delta_bytes=0, readable=False)
    assert plan([link(3), link(2, resident=True), lost], "") == Plan(BuildStart.COPY, 1)
    assert plan([link(3), link(2), lost], "v1") == Plan(BuildStart.IN_PLACE, 2)
    assert plan([link(3), link(2), lost], "") is None


def test_a_delta_that_cannot_be_read_ends_the_way() -> None:
    chain = [link(3), link(2, readable=False), link(1, delta_bytes=0, resident=True)]
    assert plan(chain, "v1") is None
    assert plan(chain, "v2") == Plan(BuildStart.IN_PLACE, 1)


def test_with_no_store_only_memory_counts() -> None:
    alone = [link(1, delta_bytes=0, readable=False)]
    assert plan(alone, "") is None
    assert plan(alone, "v1") == Plan(BuildStart.IN_PLACE, 0)
