"""What engines hold is told page by page, and only of those that are proved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from weightsync.model.manifest import Layout, Manifest, ShardEntry, TensorEntry
from weightsync_server.catalog import engine_layouts
from weightsync_server.catalog.engine_layouts import EngineLayouts
from weightsync_server.catalog.record import VersionRecord

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass
class Engine:
    proved: VersionRecord | None

    async def takes(self, tensors: Sequence[TensorEntry], *, whole: bool = False) -> bool:
        raise AssertionError(tensors, whole)


def layout(count: int = 7, dtype: str = "BF16") -> Layout:
    tensors = tuple(TensorEntry(f"t{at}", dtype, (2, at), 0, 0, 0) for at in range(count))
    return Layout((ShardEntry("x", 0, 0),), tensors)


def engine(held: Layout | None) -> Engine:
    record = VersionRecord("m", 1)
    record.manifest = Manifest(held, ()) if held is not None else None
    return Engine(record)


async def test_pages_hold_all_tensors_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_layouts, "_PAGE_BYTES", 120)
    layouts, held = EngineLayouts(), layout()
    there = layouts.engines["e"] = engine(held)
    assert there.proved is not None
    found: list[TensorEntry] = []
    token, pages = "", 0
    while token or not pages:
        page = await layouts.page("", token)
        assert page.signature == held.signature
        found += page.tensors
        token, pages = page.next_token, pages + 1
    assert tuple(found) == held.tensors
    assert pages > 2
    assert await layouts.page(held.signature, "") == (held.signature, (), "")


async def test_pages_of_layouts_with_one_signature_go_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_layouts, "_PAGE_BYTES", 120)
    layouts, first = EngineLayouts(), layout()
    # The same tensors lie in its shards in another order.
    then = Layout(first.shards, tuple(reversed(first.tensors)))
    there = layouts.engines["e"] = engine(first)
    page = await layouts.page("", "")
    found = [*page.tensors]
    there.proved = engine(then).proved
    while page.next_token:
        page = await layouts.page("", page.next_token)
        assert page.signature == first.signature
        found += page.tensors
    assert sorted(t.name for t in found) == sorted(t.name for t in first.tensors)


@pytest.mark.parametrize(
    "token", ["x", "7", ".3", "{0}.", "{0}.-1", "{0}.\u0663", "{0}.1e3", "0" * 32 + ".3"]
)
async def test_a_token_of_something_else_asks_for_the_first_page(token: str) -> None:
    layouts, held = EngineLayouts(), layout()
    there = layouts.engines["e"] = engine(held)
    assert there.proved is not None
    page = await layouts.page("", token.format(held.signature))
    assert tuple(page.tensors) == held.tensors


async def test_a_token_beyond_the_end_is_the_end() -> None:
    layouts, held = EngineLayouts(), layout()
    there = layouts.engines["e"] = engine(held)
    assert there.proved is not None
    for position in ("7", "999999999", "9" * 5000):
        page = await layouts.page("", f"{held.signature}.{position}")
        assert not page.next_token


async def test_nothing_is_known_without_a_proof_or_of_engines_that_differ() -> None:
    layouts = EngineLayouts()
    assert await layouts.page("", "") == ("", (), "")
    for absent in (Engine(None), engine(None)):
        layouts.engines["e"] = absent
        assert (await layouts.page("", "")).signature == ""
    first, second, other = engine(layout()), engine(layout()), engine(layout(dtype="F32"))
    layouts.engines["f"] = first
    assert (await layouts.page("", "")).signature == layout().signature
    layouts.engines["g"] = second
    assert (await layouts.page("", "")).signature == layout().signature
    layouts.engines["h"] = other
    assert (await layouts.page("", "")).signature == ""
    # It is gone.
    del other
    assert (await layouts.page("", "")).signature == layout().signature
