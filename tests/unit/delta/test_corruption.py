"""No byte of a shard can change unnoticed, and no shard, however made, gets past its bounds."""

from __future__ import annotations

import struct
import tracemalloc
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import xxhash
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.delta import forge
from tests.unit.delta.cases import changed_item, encode, expected, items
from weightsync.delta import DeltaError, Item, apply_change, decode_tensor, parse_shard, patch
from weightsync.delta.coding import Coding, Counts, Positions, Values
from weightsync.delta.decoder import ElementUpdate
from weightsync.delta.delta_manifest import DeltaManifest, write_manifest
from weightsync.errors import Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

# The first test of a process may compile all kernels.
pytestmark = pytest.mark.timeout(300)

_EXPECT = {"w": ("BF16", (64,))}
_REASONS = (Reason.SHARD_INVALID, Reason.LAYOUT_INVALID, Reason.DIGEST_MISMATCH)


def _use(blob: NDArray[np.uint8], expect: Mapping[str, Any]) -> None:
    """Do all that a receiver does; a refusal leaves the base as it was."""
    for change in parse_shard(blob, expect).changes.values():
        target = np.zeros(change.size, np.uint8)
        try:
            apply_change(change, target)
        except DeltaError:
            assert not target.any()
        decode_tensor(change, np.zeros(change.size, np.uint8))


def _refused(blob: NDArray[np.uint8], expect: Mapping[str, Any] = _EXPECT) -> DeltaError:
    """Return why a shard is refused."""
    with pytest.raises(DeltaError) as caught:
        _use(blob, expect)
    error = caught.value
    assert error.reason in _REASONS
    assert len(error.message) < 700
    assert error.message.isascii()
    assert error.message.isprintable()
    assert ";" in error.message
    return error


def _rich() -> list[Item]:
    """Return tensors that together use every coding and every field of a record."""
    return [
        changed_item("a.bitmap", "BF16", (90,), 0.5),
        changed_item("a.dense", "I32", (), 1.0, ulp=False),
        changed_item("a.gap16", "F16", (3, 700), 0.002, seed=3),
        changed_item("a.gap8", "U8", (700,), 0.02),
        changed_item("b", "F64", (40,), 0.1),
    ]


@pytest.mark.parametrize("zstd", [False, True])
def test_every_bit_of_every_byte_is_guarded(zstd: bool) -> None:
    given_items = _rich()
    if zstd:
        given_items = [*given_items, changed_item("z", "BF16", (6000,), 0.2)]
    blob = encode(given_items, zstd=zstd).blob
    expect = expected(given_items)
    parse_shard(blob, expect)
    for at in range(len(blob)):
        for flip in (0x01, 0x80, 0xFF) if not zstd else (0x10,):
            blob[at] ^= flip
            with pytest.raises(DeltaError):
                parse_shard(blob, expect)
            blob[at] ^= flip
    parse_shard(blob, expect)


@settings(max_examples=200)
@given(items(), st.booleans(), st.data())
def test_any_byte_of_any_shard(item: Item, zstd: bool, data: st.DataObject) -> None:
    blob = encode([item], zstd=zstd).blob
    at = data.draw(st.integers(0, len(blob) - 1))
    blob[at] ^= data.draw(st.integers(1, 255))
    _refused(blob, expected([item]))


@settings(max_examples=100)
@given(items(), st.data())
def test_any_cut_and_any_more(item: Item, data: st.DataObject) -> None:
    blob = encode([item]).blob
    cut = data.draw(st.integers(0, len(blob) - 1))
    _refused(blob[:cut], expected([item]))
    more = np.frombuffer(data.draw(st.binary(min_size=1, max_size=9)), np.uint8)
    _refused(np.concatenate([blob, more]), expected([item]))


@settings(max_examples=300)
@given(
    st.sampled_from([p for p in Positions if p is not Positions.NONE]),
    st.lists(st.binary(max_size=12), min_size=1, max_size=2),
    st.lists(st.binary(max_size=12), min_size=1, max_size=5),
    st.builds(Counts, *[st.integers(0, 12)] * 4),
)
def test_right_checksums_over_anything(
    where: Positions, positions: list[bytes], values: list[bytes], counts: Counts
) -> None:
    """Hostile planes are refused or decoded; nothing else, and never outside of the tensor."""
    what = Values.SM if len(values) == 5 else Values.ABS
    blob = forge.tensor(positions, values, counts, where, what)
    target = np.zeros(128, np.uint8)
    try:
        (change,) = parse_shard(blob, _EXPECT).changes.values()
        done = decode_tensor(change, target)
    except DeltaError:
        return
    assert done.index is not None
    assert len(done.index) == counts.changed
    assert (np.diff(done.index) > 0).all()
    assert 0 <= done.index[0] <= done.index[-1] < 64
    apply_change(change, target)


_ONE = [b"\x00"], [b"\x01", b"\x00", b"", b"", b""]


@pytest.mark.parametrize(
    ("positions", "values", "counts", "why"),
    [
        ([b"\x40"], _ONE[1], Counts(1), "gaps"),
        ([b"\x3f\x00"], [b"\x00", b"\x00", b"", b"", b""], Counts(2), "gaps"),
        (_ONE[0], [b"\x02", b"\x00", b"", b"", b""], Counts(1), "large or wide"),
        (_ONE[0], [b"\x00", b"\x80", b"", b"", b""], Counts(1), "large or wide"),
        (_ONE[0], [b"\x00", b"\x01", b"", b"", b""], Counts(1), "large or wide"),
        (_ONE[0], [b"\x00", b"\x00", b"\x01", b"", b""], Counts(1, 0, 1), "large or wide"),
        (_ONE[0], [b"\x00", b"\x01", b"\xff", b"", b""], Counts(1, 0, 1), "large or wide"),
        (
            _ONE[0],
            [b"\x00", b"\x01", b"\x01", b"\x01", b"\x01"],
            Counts(1, 0, 1, 1),
            "large or wide",
        ),
        (
            _ONE[0],
            [b"\x00", b"\x01", b"\xff", b"\x00", b"\x01"],
            Counts(1, 0, 1, 1),
            "large or wide",
        ),
        (
            _ONE[0],
            [b"\x00", b"\x01", b"\xff", b"\x01", b"\x80"],
            Counts(1, 0, 1, 1),
            "large or wide",
        ),
        (_ONE[0], _ONE[1], Counts(0), "impossible"),
        (_ONE[0], _ONE[1], Counts(65), "impossible"),
        (_ONE[0], _ONE[1], Counts(1, 1), "impossible"),
        (_ONE[0], _ONE[1], Counts(1, 0, 2), "impossible"),
        (_ONE[0], _ONE[1], Counts(1, 0, 1, 2), "impossible"),
        (_ONE[0], _ONE[1], Counts(2), "end after"),
    ],
)
def test_planes_that_contradict_their_counts(
    positions: list[bytes], values: list[bytes], counts: Counts, why: str
) -> None:
    parse_shard(forge.tensor(*_ONE, Counts(1)), _EXPECT)
    error = _refused(forge.tensor(positions, values, counts))
    assert why in error.message
    assert "encode the delta again" in error.message


def test_bytes_that_are_of_no_tensor() -> None:
    made = forge.record(*_ONE, Coding(Positions.GAP8, Values.SM), Counts(1))
    for positions, values in ((b"\x00\x00", b"\x01\x00"), (b"\x00", b"\x01\x00\x00")):
        assert "1 bytes of" in _refused(forge.blob([made], positions, values)).message


def test_skips_that_are_not_those_declared() -> None:
    expect = {"w": ("U8", (1000,))}
    more: dict[str, Any] = {"dtype": "U8", "shape": (1000,), "what": Values.ABS}
    good = forge.tensor([b"\xff\x05"], [b"v"], Counts(1, 1), **more)
    (change,) = parse_shard(good, expect).changes.values()
    assert decode_tensor(change, np.zeros(1000, np.uint8)).index.tolist() == [260]  # type: ignore[union-attr] # sparse
    for plane in (b"\x05\x05", b"\x05\xff", b"\xff\xff"):
        assert (
            "gaps" in _refused(forge.tensor([plane], [b"v"], Counts(1, 1), **more), expect).message
        )


@pytest.mark.parametrize(
    ("plane", "why"),
    [(b"\x01", "bitmap does not"), (b"\x0f", "bitmap does not"), (b"\xe0", "bitmap does not")],
)
def test_bitmaps_that_are_wrong(plane: bytes, why: str) -> None:
    more: dict[str, Any] = {
        "where": Positions.BITMAP,
        "what": Values.ABS,
        "dtype": "U8",
        "shape": (7,),
    }
    expect = {"w": ("U8", (7,))}
    parse_shard(forge.tensor([b"\x07"], [b"abc"], Counts(3), **more), expect)
    assert why in _refused(forge.tensor([plane], [b"abc"], Counts(3), **more), expect).message


def _frame(content: bytes, **options: Any) -> bytes:
    return zstandard.ZstdCompressor(level=1, **options).compress(content)


def _lying(frame: bytes, size: int) -> bytes:
    """Return a frame whose header tells another content size in its four bytes."""
    told = zstandard.get_frame_parameters(frame).content_size
    field = struct.pack("<I", told)
    assert field in frame[:14]
    return frame.replace(field, struct.pack("<I", size), 1)


_LONG = bytes(100_000)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (_frame(_LONG[:-1]), "instead of"),
        (_frame(_LONG + b"x"), "instead of"),
        (_lying(_frame(bytes(200_000)), 100_000), "frame"),
        (_lying(_frame(bytes(99_000)), 100_000), "frame"),
        (_frame(_LONG, write_content_size=False), "instead of"),
        (_frame(_LONG)[:-3], "frame"),
        (_frame(_LONG) + b"x", "frame"),
        (_frame(_LONG) + _frame(b""), "frame"),
        (_frame(b"") + _frame(_LONG), "instead of"),
        (b"not a frame", "frame"),
        (b"\x50\x2a\x4d\x18\x04\x00\x00\x00skip", "frame"),
    ],
)
def test_frames_that_lie(frame: bytes, why: str) -> None:
    shape = (len(_LONG),)
    check = xxhash.xxh3_64_digest(frame)
    more: dict[str, Any] = {
        "dtype": "U8",
        "shape": shape,
        "stored": (len(frame),),
        "packed": (True,),
        "checks": (b"", check),
    }
    made = forge.record([], [frame], Coding(Positions.NONE, Values.DENSE), Counts(shape[0]), **more)
    assert why in _refused(forge.blob([made], b"", frame), {"w": ("U8", shape)}).message


def test_a_frame_with_a_large_window_is_refused_before_it_is_unpacked() -> None:
    content = np.random.default_rng(0).integers(0, 4, 1 << 20, np.uint8).tobytes()
    parameters = zstandard.ZstdCompressionParameters(window_log=27, compression_level=1)
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(content)
    made = forge.record(
        [], [frame], Coding(Positions.NONE, Values.DENSE), Counts(1 << 20), dtype="U8",
        shape=(1 << 20,), stored=(len(frame),), packed=(True,),
        checks=(b"", xxhash.xxh3_64_digest(frame)),
    )  # fmt: skip
    assert "frame" in _refused(forge.blob([made], b"", frame), {"w": ("U8", (1 << 20,))}).message


def test_huge_claims_take_no_memory() -> None:
    """A tensor of 2^40 bytes, told by a shard of 300 bytes, against a base that has it."""
    shape = (1 << 40,)
    frame = _frame(bytes(1 << 16))
    planes = {
        (Positions.NONE, Values.DENSE): Counts(shape[0]),
        (Positions.GAP8, Values.ABS): Counts(1 << 36, 1 << 31),
        (Positions.BITMAP, Values.ABS): Counts(1 << 36),
    }
    for (where, what), counts in planes.items():
        count = {Positions.NONE: 1}.get(where, 2)
        made = forge.record(
            [], [], Coding(where, what), counts, dtype="U8", shape=shape,
            stored=(len(frame),) * count, packed=(True,) * count,
            checks=(xxhash.xxh3_64_digest(frame),) * 2,
        )  # fmt: skip
        blob = forge.blob([made], frame * (count - 1), frame)
        (change,) = parse_shard(blob, {"w": ("U8", shape)}).changes.values()
        # Not even virtual memory is there for the base: its size alone is looked at.
        base = np.lib.stride_tricks.as_strided(np.zeros(1, np.uint8), shape, (0,))
        tracemalloc.start()
        try:
            with pytest.raises(DeltaError):
                decode_tensor(change, base)
            assert tracemalloc.get_traced_memory()[1] < 1 << 20
        finally:
            tracemalloc.stop()


# The manifest, byte by byte.


def _manifest(*records: bytes, count: int | None = None, magic: bytes = b"WSD1") -> bytes:
    body = b"".join(records)
    count = len(records) if count is None else count
    body = struct.pack("<4sII16s16sI", magic, 0, count, b"", b"", len(body)) + body
    return body + xxhash.xxh3_64_digest(body)


def _record(
    name: bytes = b"\x00\x01w",
    kind: bytes = b"\x0e\x01\x40",
    coding: bytes = b"\x22\x01\x00\x00\x00",
    packed: bytes = b"\x00",
) -> bytes:
    checks = [xxhash.xxh3_64_digest(b"".join(planes)) for planes in _ONE]
    return name + kind + bytes(16) + coding + packed + b"".join(checks)


def test_the_manifest_above_is_a_good_one() -> None:
    blob = forge.from_manifest(_manifest(_record()), b"\x00", b"\x01\x00")
    assert list(parse_shard(blob, _EXPECT).changes) == ["w"]


@pytest.mark.parametrize(
    ("manifest", "why"),
    [
        (b"", "delta"),
        (_manifest(_record(), magic=b"WSD2"), "begin"),
        (_manifest(_record(), count=2), "ends within"),
        (_manifest(_record(), b"x"), "shares"),
        (_manifest(_record(), count=0), "0 records of"),
        (_manifest(b"", _record()[:-4]), "ends within"),
        (_manifest(_record() + b"x", count=1), "after its last record"),
        (_manifest(_record(), count=4), "of a base that has 3"),
        (_manifest(_record(), _record(name=b"\x01\x00")), "ascending"),
        (_manifest(_record(), _record(name=b"\x00\x01a")), "ascending"),
        (_manifest(_record(name=b"\x01\x01w")), "shares"),
        (_manifest(_record(name=b"\x00\x00")), "ascending"),
        (_manifest(_record(name=b"\x00\x81\x00w")), "shortest"),
        (_manifest(_record(name=b"\x00" + b"\xff" * 9 + b"\x01w")), "shortest"),
        (_manifest(_record(name=b"\x00\x81\x08" + b"w" * 1025)), "too long"),
        (_manifest(_record(name=b"\x00\x01\xff")), "UTF-8"),
        (_manifest(_record(name=b"\x00\x01v")), "does not hold"),
        (_manifest(_record(kind=b"\x0d\x01\x40")), "the base has BF16"),
        (_manifest(_record(kind=b"\x0e\x01\x41")), "the base has BF16"),
        (_manifest(_record(kind=b"\x0e\x02\x40\x01")), "the base has BF16"),
        (_manifest(_record(kind=b"\x16\x01\x40")), "code 22"),
        (_manifest(_record(kind=b"\x0e\x21" + b"\x01" * 33)), "33 dimensions"),
        (_manifest(_record(coding=b"\x42\x01\x00\x00\x00")), "unknown coding 0x42"),
        (_manifest(_record(coding=b"\x23\x01\x00\x00\x00")), "unknown coding 0x23"),
        (_manifest(_record(coding=b"\x02\x01\x00\x00\x00")), "positions are coded as NONE"),
        (_manifest(_record(coding=b"\x20")), "values as DENSE"),
        (_manifest(_record(packed=b"\x40")), "packs planes"),
        (_manifest(_record(packed=b"\x01\x01")), "packed into 1"),
        (_manifest(_record(packed=b"\x01\x00")), "packed into 0"),
        (_manifest(_record())[:-1] + b"\x00", "checksum"),
    ],
)
def test_manifests_that_are_refused(manifest: bytes, why: str) -> None:
    expect = _EXPECT | {"x": ("U8", ()), "y": ("U8", ())}
    assert why in _refused(forge.from_manifest(manifest, b"\x00", b"\x01\x00"), expect).message


def _packed(stored: bytes, size: int) -> NDArray[np.uint8]:
    body = struct.pack("<4sII16s16sI", b"WSD1", 0, 1, b"", b"", size) + stored
    manifest = body + xxhash.xxh3_64_digest(body)
    return forge.from_manifest(manifest, b"\x00", b"\x01\x00")


def test_a_packed_manifest_is_what_it_says() -> None:
    name = "w" * 1000
    expect = {name: ("BF16", (64,))}
    records = _record(name=b"\x00\xe8\x07" + name.encode())
    frame = _frame(records)
    assert list(parse_shard(_packed(frame, len(records)), expect).changes) == [name]
    for stored, size, why in (
        (frame, len(records) - 1, "instead of"),
        (frame, len(frame) - 1, "are stored in"),
        (frame, 2049, "are stored in"),
        (_frame(bytes(2040)), 2048, "instead of"),
        (b"x" * 50, len(records), "not a zstd frame"),
        (frame + b"x", len(records), "not a zstd frame"),
    ):
        assert why in _refused(_packed(stored, size), expect).message


def test_sm_needs_two_bytes() -> None:
    blob = forge.tensor(*_ONE, Counts(1), dtype="F32")
    assert "which is for 2 bytes alone" in _refused(blob, {"w": ("F32", (64,))}).message


@pytest.mark.parametrize("text", ["", " ", '"__metadata__":{"a":"b"},'])
def test_other_headers_with_the_same_meaning(text: str) -> None:
    blob = forge.tensor(*_ONE, Counts(1)).tobytes()
    size = int.from_bytes(blob[:8], "little")
    header = blob[8 : 8 + size].decode().rstrip()
    header = header.replace("{", "{" + text, 1) + " " * 8 * (not text)
    changed = len(header).to_bytes(8, "little") + header.encode() + blob[8 + size :]
    assert "header" in _refused(np.frombuffer(bytearray(changed), np.uint8)).message


def test_the_index_in_names_is_that_of_the_manifest() -> None:
    blob = forge.tensor(*_ONE, Counts(1)).tobytes().replace(b".00000", b".00001")
    assert "index" in _refused(np.frombuffer(bytearray(blob), np.uint8)).message


@pytest.mark.parametrize("count", [0, 1, 2, 4])
def test_shards_of_another_number_of_tensors(count: int) -> None:
    from weightsync.model.layout import build_header

    header, _ = build_header((f"t{at}", "U8", (1,)) for at in range(count))
    blob = len(header).to_bytes(8, "little") + header + bytes(count)
    assert _refused(np.frombuffer(bytearray(blob), np.uint8)).reason is Reason.SHARD_INVALID


def test_a_base_of_another_size_is_refused() -> None:
    (change,) = parse_shard(forge.tensor(*_ONE, Counts(1)), _EXPECT).changes.values()
    for use in (decode_tensor, apply_change):
        for base in (np.zeros(127, np.uint8), np.zeros(256, np.uint8)[::2], np.zeros(64, "<u2")):
            with pytest.raises(DeltaError, match="has 128 bytes"):
                use(change, base)


@pytest.mark.parametrize("index", [[-1, 3], [0, 4], [1 << 30]])
def test_a_patch_that_does_not_fit_writes_nothing(index: list[int]) -> None:
    target = np.zeros(8, np.uint8)
    hostile = ElementUpdate(np.array(index, np.int32), np.ones(len(index), "<u2"))
    with pytest.raises(DeltaError, match="does not fit"):
        patch(target, hostile)
    for start in (1, -1, 4, 1 << 40):
        with pytest.raises(DeltaError, match="does not fit"):
            patch(target, ElementUpdate(None, np.ones(4, "<u2"), start))
    assert not target.any()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": "F3"}, "unknown dtype"),
        ({"shape": (63,)}, "needs 126 bytes"),
        ({"shape": (-1,)}, "impossible shape"),
        ({"name": "a\ud800"}, "UTF-8"),
        ({"name": ""}, "0 bytes"),
        ({"base": np.zeros(127, np.uint8)}, "contiguous bytes"),
        ({"base": np.zeros(256, np.uint8)[::2]}, "contiguous bytes"),
        ({"base": np.zeros((2, 64), np.uint8)}, "contiguous bytes"),
        ({"new": np.zeros(128, np.int8)}, "contiguous bytes"),
    ],
)
def test_tensors_that_cannot_be_encoded(change: dict[str, Any], why: str) -> None:
    item = changed_item("w", "BF16", (64,), 0.5)
    with pytest.raises(DeltaError, match=why):
        encode([item._replace(**change)])


def test_shards_that_cannot_be_encoded() -> None:
    item = changed_item("w", "BF16", (64,), 0.5)
    with pytest.raises(DeltaError, match="twice"):
        encode([item, item])
    with pytest.raises(DeltaError, match="shard must be from 0"):
        encode([item], index=1 << 32)


def test_a_manifest_of_another_base_says_so() -> None:
    made = DeltaManifest(3, "ab" * 16, "cd" * 16, ())
    delta = parse_shard(forge.blob([], base_content_digest="ab" * 16, layout_digest="cd" * 16), {})
    assert (delta.base_content_digest, delta.layout_digest) == ("ab" * 16, "cd" * 16)
    assert write_manifest(made)[:4] == b"WSD1"
