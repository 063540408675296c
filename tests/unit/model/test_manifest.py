from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightsync.model.digest import content_digest, lines_digest, tensor_digest
from weightsync.model.layout import build_header, check_version
from weightsync.model.manifest import Layout, Manifest, ShardEntry


def _manifest() -> Manifest:
    shards, groups = [], []
    contents: list[list[tuple[str, str, tuple[int, ...]]]] = [
        [("z", "BF16", (2, 3)), ("scalar", "F32", ()), ("empty", "F64", (0, 4))],
        [("ä \N{SNOWMAN}", "F4", (4,))],
    ]
    for index, tensors in enumerate(contents):
        header, places = build_header(tensors, index)
        shards.append(ShardEntry(f"model-{index}", 8 + len(header) + places[-1].end, len(header)))
        groups.append(places)
    layout = check_version(shards, groups)
    return Manifest(layout, tuple(tensor_digest(t.name.encode()) for t in layout.tensors))


def test_what_is_stored_is_read_back() -> None:
    manifest = _manifest()
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    assert again.manifest_digest == manifest.manifest_digest
    assert again.content_digest == manifest.content_digest
    assert Manifest.from_json(memoryview(manifest.to_json())) == manifest


def test_the_layout_digest_is_that_of_the_proto() -> None:
    lines = [
        '"empty" F64 0,4 0 16 16',
        '"scalar" F32  0 12 16',
        '"z" BF16 2,3 0 0 12',
        '"\\u00e4 \\u2603" F4 4 1 0 2',
        *(f"{at} {s.size} {s.header_size}" for at, s in enumerate(_manifest().layout.shards)),
    ]
    assert _manifest().layout.digest == lines_digest(lines)


def test_tensors_are_grouped_by_shard_in_the_order_of_their_bytes() -> None:
    first, second = _manifest().layout.by_shard
    assert [tensor.name for tensor in first] == ["z", "scalar", "empty"]
    assert [tensor.shard for tensor in second] == [1]
    assert _manifest().layout.size == sum(s.size for s in _manifest().layout.shards)
    assert _manifest().layout.shards[0].data_start == 8 + _manifest().layout.shards[0].header_size


def test_the_largest_shard_has_the_first_turn_and_equal_ones_keep_their_order() -> None:
    shards = tuple(ShardEntry(str(size), size, 2) for size in (30, 70, 50, 70))
    assert Layout(shards, ()).largest_first == (1, 3, 2, 0)


@pytest.mark.parametrize("field", ["name", "size", "header_size"])
def test_the_manifest_digest_covers_the_shards(field: str) -> None:
    manifest = _manifest()
    shard = manifest.layout.shards[0]
    value: Any = "other" if field == "name" else getattr(shard, field) + 1
    changed: ShardEntry = dataclasses.replace(shard, **{field: value})
    layout = dataclasses.replace(manifest.layout, shards=(changed, *manifest.layout.shards[1:]))
    assert Manifest(layout, manifest.digests).manifest_digest != manifest.manifest_digest


@pytest.mark.parametrize("where", [0, 1, 2])
def test_every_tensor_digest_counts(where: int) -> None:
    manifest = _manifest()
    digests = list(manifest.digests)
    digests[where] = bytes(16)
    assert Manifest(manifest.layout, tuple(digests)).content_digest != manifest.content_digest


def test_every_cut_is_refused() -> None:
    whole = _manifest().to_json()
    for end in range(len(whole)):
        with pytest.raises(ValueError):
            Manifest.from_json(whole[:end])


@pytest.mark.parametrize(
    "change",
    [
        {"format": 1},
        {"format": None},
        {"shards": [["a", 1]]},
        {"shards": 7},
        {"tensors": 3},
        {"tensors": "4"},
        {"tensors": None},
    ],
)
def test_other_facts_are_refused(change: dict[str, object]) -> None:
    facts, *tensors = _manifest().to_json().split(b"\n")
    changed = json.dumps(json.loads(facts) | change).encode()
    with pytest.raises(ValueError):
        Manifest.from_json(b"\n".join([changed, *tensors]))


@pytest.mark.parametrize(
    "row",
    [
        ["a"],
        ["a", "U8", 7, 0, 0, 0, "00"],
        ["a", "U8", [], 0, 0, 0, "xx"],
        ["a", "U8", [], 0, 0, 0, 7],
        None,
    ],
)
def test_other_tensors_are_refused(row: object) -> None:
    facts = json.dumps({"format": 2, "shards": [["s", 100, 20]], "tensors": 1})
    for line in ([row], row):
        with pytest.raises(ValueError):
            Manifest.from_json(f"{facts}\n{json.dumps(line)}".encode())


@pytest.mark.parametrize("count", [499, 500, 501, 1500])
def test_many_tensors_are_written_in_lines(count: int) -> None:
    # Names whose order differs from that of their bytes, beyond the basic plane too.
    names = [f"{chr(0x1F600 + index)}{index * 7919 % count}" for index in range(count)]
    names[::2] = [f"\ue000{name}" for name in names[::2]]
    header, places = build_header([(name, "U8", (1,)) for name in names], 0)
    shard = ShardEntry("m", 8 + len(header) + count, len(header))
    layout = check_version([shard], [places])
    manifest = Manifest(layout, tuple(tensor_digest(t.name.encode()) for t in layout.tensors))
    lines = manifest.to_json().split(b"\n")
    assert len(lines) == 1 + -(-count // 500)
    assert max(map(len, lines)) < 60_000
    again = Manifest.from_json(manifest.to_json())
    assert again == manifest
    by_bytes = sorted(range(count), key=lambda at: layout.tensors[at].name.encode())
    assert list(layout.by_name) == by_bytes
    tensors = zip(layout.tensors, manifest.digests, strict=True)
    found = content_digest((t.name, t.dtype, t.shape, digest) for t, digest in tensors)
    assert again.content_digest == found


def test_every_tensor_has_a_digest() -> None:
    manifest = _manifest()
    with pytest.raises(ValueError, match="3 digests of 4 tensors"):
        _ = Manifest(manifest.layout, manifest.digests[1:]).content_digest


@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(str.encode)))
def test_garbage_is_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError):
        Manifest.from_json(data)


@pytest.mark.parametrize("document", [[], {}, 7, "format", None, {"format": 2}])
def test_json_of_another_kind_is_a_value_error(document: object) -> None:
    with pytest.raises(ValueError):
        Manifest.from_json(json.dumps(document).encode())
