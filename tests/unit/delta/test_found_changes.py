"""Changes that a device found are coded as the encoder codes the bytes themselves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.delta import Changes, DeltaError, Item, encode_shard
from weightsync.model.digest import tensor_digest

_DIGEST = "0" * 32
_DTYPES = {1: "F8_E4M3", 2: "BF16", 4: "F32", 8: "F64"}


def changes_of(before: np.ndarray[Any, Any], after: np.ndarray[Any, Any]) -> Changes:
    (index,) = np.nonzero(before != after)
    data = after.view(np.uint8)
    digest = tensor_digest(data.data)
    return Changes(
        "w",
        _DTYPES[after.itemsize],
        after.shape,
        index.astype(np.int32),
        before[index],
        after[index],
        lambda: digest,
        lambda: digest,
        lambda: data,
    )


def blob(item: Any, *, zstd: bool) -> tuple[bytes, Any]:
    shard = encode_shard(
        [item], zstd=zstd, base_content_digest=_DIGEST, layout_digest=_DIGEST, index=3
    )
    return shard.blob.tobytes(), shard.stats


@given(
    width=st.sampled_from((1, 2, 4, 8)),
    elements=st.integers(0, 3000),
    density=st.sampled_from((0.0, 0.001, 0.01, 0.2, 1.0)),
    reach=st.sampled_from((1, 3, 300, 1 << 15)),
    zstd=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_the_shard_is_that_of_the_bytes(
    width: int, elements: int, density: float, reach: int, zstd: bool, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    before = rng.integers(0, 1 << (8 * width - 1), elements, np.uint64).astype(f"<u{width}")
    steps = rng.integers(1, min(reach, 100 if width == 1 else reach) + 1, elements)
    moved = np.where(rng.random(elements) < density, steps, 0) * rng.choice((-1, 1), elements)
    after = (before + moved.astype(np.int64).astype(f"<u{width}")).astype(f"<u{width}")
    item = Item("w", _DTYPES[width], (elements,), before.view(np.uint8), after.view(np.uint8))
    assert blob(changes_of(before, after), zstd=zstd) == blob(item, zstd=zstd)


def test_a_bitmap_of_many_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightsync.delta.encoder._PIECE", 64)
    before = np.zeros(1003, np.uint16)
    after = before.copy()
    after[::3] = 1
    item = Item("w", "BF16", (1003,), before.view(np.uint8), after.view(np.uint8))
    assert blob(changes_of(before, after), zstd=False) == blob(item, zstd=False)


@pytest.mark.parametrize("dtype", [np.int16, np.uint32, np.int64, ">i4"])
def test_positions_may_have_any_form(dtype: Any) -> None:
    before, after = np.zeros(3000, np.uint16), np.zeros(3000, np.uint16)
    after[7::301] = 5
    good = changes_of(before, after)
    apart = np.repeat(good.index, 2).astype(dtype)[::2]
    assert blob(replace(good, index=apart), zstd=False) == blob(good, zstd=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"index": np.array([3, 3], np.int32)},
        {"index": np.array([-1, 3], np.int32)},
        {"index": np.array([3, 10], np.int32)},
        {"index": np.array([3], np.int32)},
        {"before": np.array([5, 6], np.uint16)},
        {"after": np.array([5, 6], np.uint32)},
    ],
)
def test_impossible_changes_are_refused(wrong: dict[str, Any]) -> None:
    good = changes_of(np.zeros(10, np.uint16), np.array([0, 0, 0, 5, 0, 0, 6, 0, 0, 0], np.uint16))
    with pytest.raises(DeltaError, match="'w' must be ascending positions"):
        blob(replace(good, **wrong), zstd=False)
