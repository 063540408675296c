"""decode(encode(a, b)) is b, to the bit, for every dtype, density and special value."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import deserialize

from tests.unit.delta.cases import (
    BASE_DIGEST,
    LAYOUT_DIGEST,
    SPECIAL_BF16,
    changed_item,
    digests,
    encode,
    expected,
    many,
)
from weightsync.delta import (
    DeltaError,
    Item,
    WholeTensor,
    apply_change,
    decode_tensor,
    encode_shard,
    parse_shard,
    patch,
)
from weightsync.delta.coding import Positions, Values
from weightsync.model.digest import tensor_digest
from weightsync.model.dtypes import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Callable


# The first test of a process may compile all kernels.
pytestmark = pytest.mark.timeout(300)


def _check(items: list[Item], **options: bool | int) -> dict[str, str]:
    """Encode, decode in both ways and undo; return the codings."""
    encoded = encode(items, **options)  # type: ignore[arg-type] # the test's own keywords
    delta = parse_shard(encoded.blob, expected(items))
    assert (delta.index, delta.base_content_digest) == (encoded.index, BASE_DIGEST)
    assert delta.layout_digest == LAYOUT_DIGEST
    assert [stats.digest for stats in encoded.stats] == digests(items)
    for item, stats in zip(items, encoded.stats, strict=True):
        differs = item.base.tobytes() != item.new.tobytes()
        assert (stats.name, stats.changed) == (item.name, differs)
        assert (item.name in delta.changes) == differs
        if not differs:
            assert (stats.nnz, stats.stored_bytes, stats.coding) == (0, 0, "unchanged")
            continue
        change = delta.changes[item.name]
        assert change.digest == stats.digest
        before = item.base.tobytes()
        done = decode_tensor(change, item.base)
        assert item.base.tobytes() == before
        target = item.base.copy()
        undo = patch(target, done)
        assert target.tobytes() == item.new.tobytes()
        # Twice is harmless.
        patch(target, done)
        assert target.tobytes() == item.new.tobytes()
        patch(target, undo)
        assert target.tobytes() == before
        applied, undo = apply_change(change, target)
        assert target.tobytes() == item.new.tobytes()
        assert np.array_equal(applied.value, done.value)
        patch(target, undo)
        assert target.tobytes() == before
    return {stats.name: stats.coding for stats in encoded.stats}


@settings(max_examples=300)
@given(many(), st.booleans(), st.booleans())
def test_any_tensors(items: list[Item], zstd: bool, absolute: bool) -> None:
    _check(items, zstd=zstd, absolute=absolute)


@pytest.mark.parametrize("dtype", sorted(DTYPE_BITS))
@pytest.mark.parametrize("density", [0.001, 0.01, 0.05, 0.3, 1.0])
def test_every_dtype_at_every_density(dtype: str, density: float) -> None:
    items = [changed_item("w", dtype, (400, 96), density, seed=7)]
    for zstd in (False, True):
        _check(items, zstd=zstd)


@pytest.mark.parametrize(
    ("density", "coding"),
    [(0.0005, "gap16+sm"), (0.01, "gap8+sm"), (0.3, "bitmap+sm"), (1.0, "bitmap+sm")],
)
def test_the_coding_follows_the_density(density: float, coding: str) -> None:
    assert _check([changed_item("w", "BF16", (500_000,), density)]) == {"w": coding}


def test_what_would_not_be_smaller_is_dense() -> None:
    items = [changed_item("w", "F32", (1000,), 1.0, ulp=False)]
    assert _check(items) == {"w": "dense"}
    delta = parse_shard(encode(items).blob, expected(items))
    done = decode_tensor(delta.changes["w"], items[0].base)
    assert done.index is None
    assert done.value.tobytes() == items[0].new.tobytes()


def test_absolute_values_need_no_base() -> None:
    items = [changed_item("w", "BF16", (50_000,), 0.01)]
    assert _check(items, absolute=True) == {"w": "gap8+abs"}
    delta = parse_shard(encode(items, absolute=True).blob, expected(items))
    done = decode_tensor(delta.changes["w"], np.zeros_like(items[0].base))
    target = items[0].base.copy()
    patch(target, done)
    assert target.tobytes() == items[0].new.tobytes()


def test_special_values_keep_their_bits() -> None:
    pairs = [(a, b) for a in SPECIAL_BF16 for b in SPECIAL_BF16]
    before, after = (np.array(column, "<u2").view(np.uint8) for column in zip(*pairs, strict=True))
    for repeat in (1, 40):
        base, new = (np.tile(column, repeat) for column in (before, after))
        for dtype in ("BF16", "F16", "I16"):
            _check([Item("w", dtype, (len(pairs) * repeat,), base, new)], zstd=True)


@pytest.mark.parametrize("difference", [1, 2, 255, 256, 257, 258, 32767, 32768, 32769, 65535])
def test_every_size_of_a_difference(difference: int) -> None:
    base = np.arange(0, 65536, 7, dtype="<u2")
    new = base + np.uint16(difference)
    shape = (len(base),)
    _check([Item("w", "BF16", shape, base.view(np.uint8), new.view(np.uint8))])


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 65534, 65535, 65536, 131070])
def test_every_length_of_a_gap(gap: int) -> None:
    # A dense start or a sparse rest makes the encoder choose either width.
    for first in (0, 1, gap):
        base = np.zeros(3 * gap + 400_000, np.uint8)
        new = base.copy()
        new[[first, first + gap + 1, first + 2 * gap + 2]] = 1
        new[-1] = 1
        _check([Item("w", "U8", (len(base),), base, new)])
        new[-20_000:] = 1
        _check([Item("w", "U8", (len(base),), base, new)])


@pytest.mark.parametrize("size", [1, 7, 8, 9, 63, 64, 65, 127, 128, 129, 4095, 4096, 4097, 65537])
@pytest.mark.parametrize("dtype", ["U8", "BF16", "F32", "F64"])
def test_every_length_of_a_tensor(size: int, dtype: str) -> None:
    for density in (0.02, 0.5, 1.0):
        _check([changed_item("w", dtype, (size,), density, seed=size)])


def test_only_the_last_and_only_the_first_element() -> None:
    for at in (0, -1):
        base = np.zeros(2 * 70_001, np.uint8)
        new = base.copy()
        new.view("<u2")[at] = 0x8000
        _check([Item("w", "BF16", (70_001,), base, new)])


def test_nothing_changed_is_a_shard_too() -> None:
    items = [changed_item("w", "BF16", (100,), 0.0), changed_item("v", "F32", (), 0.0)]
    for given_items in (items, []):
        encoded = encode(given_items, index=12)
        delta = parse_shard(encoded.blob, expected(given_items))
        assert dict(delta.changes) == {}
        assert delta.index == 12
        assert len(encoded.blob) < 512


def test_a_known_digest_of_what_is_unchanged_is_believed() -> None:
    item = changed_item("w", "BF16", (100,), 0.0)
    known = item._replace(base_digest=b"x" * 16)
    assert encode([known]).stats[0].digest == b"x" * 16
    assert encode([item]).stats[0].digest == tensor_digest(item.new.data)
    different = changed_item("w", "BF16", (100,), 1.0)._replace(base_digest=b"x" * 16)
    assert encode([different]).stats[0].digest == tensor_digest(different.new.data)


def test_a_shard_is_an_ordinary_safetensors_file() -> None:
    encoded = encode([changed_item("w", "BF16", (1000,), 0.1)], index=7)
    read: Callable[[bytes], list[tuple[str, Any]]] = deserialize
    found = dict(read(encoded.blob.tobytes()))
    assert sorted(found) == ["wsd1.manifest.00007", "wsd1.positions.00007", "wsd1.values.00007"]
    assert {entry["dtype"] for entry in found.values()} == {"U8"}
    stored = sum(len(found[f"wsd1.{what}.00007"]["data"]) for what in ("positions", "values"))
    assert stored == sum(stats.stored_bytes for stats in encoded.stats)


def test_threads_change_no_bit() -> None:
    items = [
        changed_item(f"layer.{at}", "BF16", (3000 + 100 * at,), 0.02 * at, seed=at)
        for at in range(12)
    ]
    alone = encode(items, zstd=True)
    together = encode(items, zstd=True, threads=4)
    assert alone.blob.tobytes() == together.blob.tobytes()
    assert alone.stats == together.stats
    plainly = encode_shard(
        [item[:5] for item in items],
        zstd=True,
        base_content_digest=BASE_DIGEST,
        layout_digest=LAYOUT_DIGEST,
        index=0,
    )
    assert plainly.blob.tobytes() == alone.blob.tobytes()


def test_the_order_of_tensors_given_does_not_matter() -> None:
    items = [changed_item(name, "BF16", (300,), 0.1) for name in ("b", "ä", "a", "a.b")]
    assert encode(items).blob.tobytes() == encode(items[::-1]).blob.tobytes()
    names = [stats.name for stats in encode(items).stats]
    assert names == ["b", "ä", "a", "a.b"]
    assert list(parse_shard(encode(items).blob, expected(items)).changes) == ["a", "a.b", "b", "ä"]


def test_a_part_of_a_patch_touches_its_range_only() -> None:
    for density, width in ((0.05, 2), (1.0, 4)):
        item = changed_item("w", "BF16" if width == 2 else "F32", (5000,), density, ulp=width == 2)
        delta = parse_shard(encode([item]).blob, expected([item]))
        done = decode_tensor(delta.changes["w"], item.base)
        target = item.base.copy()
        for start, stop in ((0, 1000), (1000, 1000), (1000, 4999), (4999, 1 << 40)):
            part = done.within(start, stop)
            before = target.copy()
            patch(target, part)
            begin, end = start * width, stop * width
            assert target[begin:end].tobytes() == item.new[begin:end].tobytes()
            assert target[:begin].tobytes() == before[:begin].tobytes()
            assert target[end:].tobytes() == before[end:].tobytes()
        assert target.tobytes() == item.new.tobytes()


def test_codings_of_every_code_point_were_made() -> None:
    made = set()
    for density in (0.001, 0.05, 0.5):
        for dtype in ("BF16", "U8"):
            made |= set(_check([changed_item("w", dtype, (100_000,), density)]).values())
    made |= set(_check([changed_item("w", "U8", (100,), 1.0, ulp=False)]).values())
    wanted = {
        f"{where.name}+{what.name}".lower()
        for where in Positions
        for what in Values
        if where is not Positions.NONE and what is not Values.DENSE
    }
    assert made == wanted | {"dense"}


def test_a_tensor_whose_base_is_not_here_is_coded_whole_or_not_at_all() -> None:
    chance = np.random.default_rng(1)
    data = {name: chance.integers(0, 256, 64, np.uint8) for name in ("same", "other", "empty")}
    data["empty"] = data["empty"][:0]
    digests = {name: tensor_digest(bytes_.data) for name, bytes_ in data.items()}
    given = [
        WholeTensor(name, "U8", (len(new),), new, bytes(16) if name == "other" else digests[name])
        for name, new in data.items()
    ]
    encoded = encode_shard(
        given, zstd=False, base_content_digest=BASE_DIGEST, layout_digest=LAYOUT_DIGEST, index=0
    )
    assert {stats.name: stats.changed for stats in encoded.stats} == {
        "same": False,
        "other": True,
        "empty": False,
    }
    assert [stats.digest for stats in encoded.stats] == list(digests.values())
    shapes = {name: ("U8", (len(new),)) for name, new in data.items()}
    (change,) = parse_shard(encoded.blob, shapes).changes.values()
    before = np.zeros(64, np.uint8)
    apply_change(change, before)
    assert before.tobytes() == data["other"].tobytes()
    with pytest.raises(DeltaError, match="needs 64 contiguous bytes"):
        WholeTensor("a", "U8", (64,), np.zeros(128, np.uint8)[::2], b"").check()
