from __future__ import annotations

import json
import random

import numpy as np
import pytest
import xxhash

from weightsync.model.digest import (
    DIGEST_BYTES,
    TensorDigester,
    content_digest,
    content_head,
    lines_digest,
    tensor_digest,
)
from weightsync.model.layout import build_header, check_version
from weightsync.model.manifest import Manifest, ShardEntry


def test_known_vectors() -> None:
    # XXH3_128bits of nothing, seed 0, canonical big-endian:
    # https://github.com/Cyan4973/xxHash/blob/dev/cli/xsum_sanity_check.c
    assert tensor_digest(b"").hex() == "99aa06d3014798d86001c324468d497f"
    assert len(tensor_digest(b"abc")) == DIGEST_BYTES


@pytest.mark.parametrize("size", [0, 1, 3, 16, 17, 240, 241, 4096, (1 << 20) + 1])
def test_pieces_and_buffers_of_every_kind_give_the_same(size: int) -> None:
    data = random.Random(size).randbytes(size)
    whole = xxhash.xxh3_128(data, seed=0).intdigest().to_bytes(16, "big")
    pieces = TensorDigester()
    for start in range(0, size, 7919):
        pieces.update(data[start : start + 7919])
    assert tensor_digest(data) == tensor_digest(memoryview(data)) == whole
    assert tensor_digest(np.frombuffer(data, dtype=np.uint8).data) == whole
    assert pieces.digest() == whole


def test_the_canonical_form_is_that_of_the_proto() -> None:
    one, two, three = (xxhash.xxh3_128_hexdigest(data) for data in (b"\x01\x02", b"", b"xyzw"))
    # Sorted by the UTF-8 bytes of the names; a 0-dim tensor has an empty third field.
    text = (
        f'"a.weight" BF16 1 {one}\n'
        f'"b" F32 0,3 {two}\n'
        f'"\\u00fc\\"" F32  {three}\n'
    )  # fmt: skip
    found = content_digest(
        [
            ('ü"', "F32", (), bytes.fromhex(three)),
            ("b", "F32", (0, 3), bytes.fromhex(two)),
            ("a.weight", "BF16", (1,), bytes.fromhex(one)),
        ]
    )
    assert found == xxhash.xxh3_128(text.encode("ascii")).hexdigest()


def test_names_are_sorted_by_their_utf8_bytes() -> None:
    # As UTF-16, and so in some languages, U+10000 sorts before U+FFFD.
    names = ["\N{REPLACEMENT CHARACTER}", "\U00010000"]
    lines = [f"{json.dumps(name)} U8 1 {bytes(16).hex()}" for name in names]
    digests = [(name, "U8", (1,), bytes(16)) for name in reversed(names)]
    assert content_digest(digests) == lines_digest(lines)


def test_every_field_counts() -> None:
    tensors = [
        ("a", "U8", (2,), bytes(16)),
        ("b", "U8", (2,), bytes(16)),
        ("a", "I8", (2,), bytes(16)),
        ("a", "U8", (1, 2), bytes(16)),
        ("a", "U8", (2,), b"\1" * 16),
    ]
    assert len({content_digest([tensor]) for tensor in tensors}) == len(tensors)


def _manifest(order: list[str], cut: int) -> Manifest:
    """Tensors in the given order, the first `cut` of them in the first shard."""
    data = {"a": b"\1", "b": b"\2\2", "c": b""}
    shards, groups, digests = [], [], []
    for index, names in enumerate([order[:cut], order[cut:]]):
        header, places = build_header([(n, "U8", (len(data[n]),)) for n in names], index)
        end = max((place.end for place in places), default=0)
        shards.append(ShardEntry(f"{index}", 8 + len(header) + end, len(header)))
        groups.append(places)
        digests += [tensor_digest(data[place.name]) for place in places]
    return Manifest(check_version(shards, groups), tuple(digests))


def test_the_content_digest_knows_neither_order_nor_encoding() -> None:
    one, two, three = (
        _manifest(["a", "b", "c"], 1),
        _manifest(["c", "b", "a"], 2),
        _manifest(["b", "a", "c"], 3),
    )
    assert one.content_digest == two.content_digest == three.content_digest
    assert one.layout.signature == two.layout.signature == three.layout.signature
    assert len({m.layout.digest for m in (one, two, three)}) == 3
    assert len({m.manifest_digest for m in (one, two, three)}) == 3


def test_names_in_lines_are_spelled_as_the_page_says() -> None:
    name = '"\\/\b\f\n\r\t\x00\x1f ~\x7f\x80\u00e4\uffff\U0001f600'
    spelled = r'''"\"\\/\b\f\n\r\t\u0000\u001f ~\u007f\u0080\u00e4\uffff\ud83d\ude00"'''
    assert content_head(name, "BF16", (2, 3)) == f"{spelled} BF16 2,3"
