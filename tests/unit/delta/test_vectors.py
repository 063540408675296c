"""The written vectors, and a second reader made from the specification's text."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.delta import reference
from tests.unit.delta.cases import changed_item, encode, expected, many
from tests.vectors import forged
from tests.vectors.make import VECTORS, accepted
from weightsync.delta import DeltaError, Encoder, Item, apply_change, parse_shard
from weightsync.delta.coding import Positions, Values
from weightsync.errors import Reason
from weightsync.model.digest import tensor_digest

# The first test of a process may compile all kernels.
pytestmark = pytest.mark.timeout(300)

DOCUMENT: dict[str, Any] = json.loads(VECTORS.read_text())
PAGE = Path(__file__).resolve().parents[3] / "docs/reference/delta-format.md"


def _bytes(text: str) -> Any:
    """Read hexadecimal digits in which `(00)12,` is twelve bytes 00."""
    spelled = re.sub(r"\((..)\)(\d+),", lambda run: run[1] * int(run[2]), text)
    return np.frombuffer(bytearray(bytes.fromhex(spelled)), np.uint8)


def _items(vector: dict[str, Any]) -> list[Item]:
    return [
        Item(t["name"], t["dtype"], tuple(t["shape"]), _bytes(t["base"]), _bytes(t["new"]))
        for t in vector["tensors"]
    ]


@pytest.mark.parametrize("vector", DOCUMENT["accepted"], ids=lambda vector: vector["what"])
def test_a_vector_makes_the_new_bytes(vector: dict[str, Any]) -> None:
    items = _items(vector)
    shard = bytes.fromhex(vector["shard"])
    delta = parse_shard(memoryview(shard), expected(items))
    assert delta.index == vector["index"]
    assert delta.base_content_digest == DOCUMENT["base_content_digest"]
    assert delta.layout_digest == DOCUMENT["layout_digest"]
    for item in items:
        target = item.base.copy()
        if item.name in delta.changes:
            apply_change(delta.changes[item.name], target)
            assert delta.changes[item.name].digest == tensor_digest(item.new.data)
        assert target.tobytes() == item.new.tobytes()
    theirs = reference.apply(shard, {item.name: item.base.tobytes() for item in items})
    assert theirs == {item.name: item.new.tobytes() for item in items}


@pytest.mark.parametrize(
    "vector", [v for v in DOCUMENT["accepted"] if v["exact"]], ids=lambda vector: vector["what"]
)
def test_the_encoder_makes_the_exact_vectors(vector: dict[str, Any]) -> None:
    with Encoder(zstd=False, absolute=vector["absolute"]) as encoder:
        encoded = encoder.encode_shard(
            _items(vector),
            base_content_digest=DOCUMENT["base_content_digest"],
            layout_digest=DOCUMENT["layout_digest"],
            index=vector["index"],
        )
    assert encoded.blob.tobytes().hex() == vector["shard"]


@pytest.mark.parametrize("vector", DOCUMENT["refused"], ids=lambda vector: vector["what"])
def test_wrong_vectors_are_refused(vector: dict[str, Any]) -> None:
    with pytest.raises(DeltaError):
        parse_shard(memoryview(bytes.fromhex(vector["shard"])), {"w": ("U16", ())})


def _made(shard: bytes) -> dict[str, Any]:
    """Return the base of the wrong vectors, all zeros, with every change of a shard applied."""
    expect = {n: (t["dtype"], tuple(t["shape"])) for n, t in DOCUMENT["refused_tensors"].items()}
    widths = {"BF16": 2, "F32": 4, "U8": 1}
    base = {
        name: np.zeros(shape[0] * widths[dtype], np.uint8)
        for name, (dtype, shape) in expect.items()
    }
    try:
        for change in parse_shard(memoryview(shard), expect).changes.values():
            apply_change(change, base[change.name])
    except DeltaError:
        assert not any(data.any() for data in base.values()), "written before it was refused"
        raise
    return base


@pytest.mark.parametrize(
    "vector", DOCUMENT["refused_with_right_checksums"], ids=lambda vector: vector["what"]
)
def test_wrong_meanings_are_refused_whatever_their_checksums(vector: dict[str, Any]) -> None:
    with pytest.raises(DeltaError) as caught:
        _made(bytes.fromhex(vector["shard"]))
    assert caught.value.reason is not Reason.DIGEST_MISMATCH, "a checksum is wrong"


def test_the_shard_that_the_wrong_ones_differ_from_is_good() -> None:
    # Else any of them might be refused for something that all of them have.
    (good,) = forged.wrong(DOCUMENT["base_content_digest"], DOCUMENT["layout_digest"], good=True)
    assert _made(bytes.fromhex(good["shard"]))["w"][:2].tolist() == [0xFF, 0xFF]


def test_the_wrong_vectors_are_those_that_the_program_writes() -> None:
    made = forged.wrong(DOCUMENT["base_content_digest"], DOCUMENT["layout_digest"])
    assert DOCUMENT["refused_with_right_checksums"] == made


def test_the_vectors_are_those_that_the_program_writes() -> None:
    written = [
        {key: value for key, value in vector.items() if key != "shard" or vector["exact"]}
        for vector in DOCUMENT["accepted"]
    ]
    made = [
        {key: value for key, value in vector.items() if key != "shard" or vector["exact"]}
        for vector in accepted()
    ]
    assert written == made


def test_the_vectors_hold_every_coding() -> None:
    found = set()
    for vector in DOCUMENT["accepted"]:
        delta = parse_shard(bytes.fromhex(vector["shard"]), expected(_items(vector)))
        for change in delta.changes.values():
            coding = change.record.coding
            found |= {coding.positions, f"values {coding.values}"}
            found |= {"packed"} if any(change.record.packed) else set()
    assert found == {*Positions, *(f"values {value}" for value in Values), "packed"}


def test_the_page_tells_every_code_point() -> None:
    page = PAGE.read_text()
    for position in Positions:
        name = "none" if position is Positions.NONE else position.name
        assert f"| {name} | {position.value} |" in page
    for value in Values:
        assert f"| {value.name} | {value.value} |" in page


@settings(max_examples=60)
@given(many(200), st.booleans(), st.booleans())
def test_the_second_reader_agrees(items: list[Item], zstd: bool, absolute: bool) -> None:
    shard = encode(items, zstd=zstd, absolute=absolute).blob.tobytes()
    found = reference.apply(shard, {item.name: item.base.tobytes() for item in items})
    assert found == {item.name: item.new.tobytes() for item in items}


@pytest.mark.parametrize("density", [0.002, 0.05, 0.4])
def test_the_second_reader_agrees_on_larger_tensors(density: float) -> None:
    item = changed_item("w", "BF16", (30_000,), density)
    for zstd in (False, True):
        found = reference.apply(
            encode([item], zstd=zstd).blob.tobytes(), {"w": item.base.tobytes()}
        )
        assert found["w"] == item.new.tobytes()
