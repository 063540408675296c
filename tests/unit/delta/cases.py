"""Tensors before and after, and shards of them."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from hypothesis import strategies as st

from weightsync.delta import Encoder, Item
from weightsync.model.digest import tensor_digest
from weightsync.model.dtypes import DTYPE_BITS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from weightsync.delta import EncodedShard

BASE_DIGEST = "0123456789abcdef" * 2
LAYOUT_DIGEST = "fedcba9876543210" * 2

#: Elements a change may leave: NaN payloads, infinities, both zeros and neighbours of each.
SPECIAL_BF16 = (
    0x0000,
    0x8000,
    0x7F80,
    0xFF80,
    0x7FC0,
    0x7FC1,
    0xFFC1,
    0x7F81,
    0x0001,
    0x8001,
    0x3F80,
)


def expected(items: Sequence[Item]) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    return {item.name: (item.dtype, item.shape) for item in items}


def encode(
    items: Sequence[Item],
    *,
    zstd: bool = False,
    threads: int = 1,
    absolute: bool = False,
    index: int = 0,
) -> EncodedShard:
    with Encoder(zstd=zstd, threads=threads, absolute=absolute) as encoder:
        return encoder.encode_shard(
            items, base_content_digest=BASE_DIGEST, layout_digest=LAYOUT_DIGEST, index=index
        )


def flat(item: Item) -> bytes:
    return item.new.tobytes()


def digests(items: Sequence[Item]) -> list[bytes]:
    return [tensor_digest(item.new.data) for item in items]


def changed_item(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    density: float,
    *,
    ulp: bool = True,
    seed: int = 0,
) -> Item:
    """Return a random tensor of which a share changed, by an ulp or two or to anything."""
    rng = np.random.default_rng(seed)
    size = math.prod(shape) * DTYPE_BITS[dtype] // 8
    width = max(DTYPE_BITS[dtype], 8) // 8
    base = rng.integers(0, 256, size, np.uint8)
    new = base.copy()
    words: NDArray[np.unsignedinteger] = new.view(f"<u{width}")
    where = np.flatnonzero(rng.random(len(words)) < density)
    if ulp:
        # Mostly one ulp, sometimes hundreds, rarely anything.
        reach = rng.choice([1, 1, 1, 1, 1, 3, 255, 256, 257, 40_000], len(where))
        sign = rng.choice([-1, 1], len(where))
        words[where] += (reach * sign).astype(words.dtype)
    else:
        words[where] = rng.integers(0, 1 << 8 * width, len(where), np.uint64).astype(words.dtype)
    return Item(name, dtype, shape, base, new)


@st.composite
def items(draw: st.DrawFn, most: int = 600) -> Item:
    """Draw one tensor before and after, of any dtype, small enough to shrink."""
    dtype = draw(st.sampled_from(sorted(DTYPE_BITS)))
    bits = DTYPE_BITS[dtype]
    step = 8 // math.gcd(8, bits)
    shape: tuple[int, ...] = (draw(st.integers(0, most // step)) * step,)
    if bits >= 8 and draw(st.booleans()):
        shape = draw(st.sampled_from([(), (0, 3), (1, 1, 1), (5, 7), *[shape]]))
    density = draw(st.sampled_from([0.0, 0.002, 0.01, 0.05, 0.3, 0.7, 1.0]))
    return changed_item(
        draw(st.text("abc.ä", min_size=1, max_size=12)),
        dtype,
        shape,
        density,
        ulp=draw(st.booleans()),
        seed=draw(st.integers(0, 1 << 16)),
    )


def many(most: int = 600) -> st.SearchStrategy[list[Item]]:
    return st.lists(items(most), max_size=4, unique_by=lambda item: item.name)
