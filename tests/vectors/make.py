"""Writes tests/vectors/delta.json: python -m tests.vectors.make."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tests.vectors import forged
from weightsync.delta import DeltaError, Item, encode_shard, parse_shard
from weightsync.delta.encoder import Encoder

__all__ = ["VECTORS", "accepted"]

VECTORS = Path(__file__).with_name("delta.json")
BASE_DIGEST, LAYOUT_DIGEST = "00112233445566778899aabbccddeeff", "ffeeddccbbaa99887766554433221100"


def _item(name: str, dtype: str, shape: tuple[int, ...], before: Any, after: Any) -> Item:
    base, new = (
        np.ascontiguousarray(words).view(np.uint8).reshape(-1) for words in (before, after)
    )
    return Item(name, dtype, shape, base, new)


def _changed(words: Any, changes: dict[int, int]) -> Any:
    after = words.copy()
    after[list(changes)] = list(changes.values())
    return after


def _bf16(count: int) -> Any:
    """Return ones, halves and so on, in a fixed order."""
    return (0x3F80 - 0x80 * (np.arange(count) % 5)).astype("<u2")


def _cases() -> dict[str, tuple[list[Item], dict[str, bool]]]:
    small = _bf16(12)
    signs = _changed(small, {0: 0xBF80, 1: 0x7FC1, 2: 0xFF80, 3: 0x0000, 4: 0x8000, 11: 0x3F01})
    steps = {at: int(small[at % 12]) + (1, -1, 2, -256, 256, 257, -300)[at % 7] for at in range(12)}
    wide = _bf16(1200)
    ulp = _changed(wide, {at: int(wide[at]) + (1 if at % 3 else -1) for at in range(5, 1200, 97)})
    far = np.zeros(140_000, "<u1")
    many = _bf16(900)
    rng = np.random.default_rng(1)
    most = _changed(
        many, {at: int(many[at]) + 1 - at % 3 for at in rng.permutation(900)[:400].tolist()}
    )
    counted = np.arange(6, dtype="<u8") * np.uint64(0x0102030405060708)
    bytes_1 = np.arange(8, dtype="<u1")
    halves = np.zeros(1000, "<u1")
    sparse = _item("w", "BF16", (1200,), wide, ulp)
    full = _item("w", "BF16", (900,), many, most)
    gaps = _changed(far, {3: 1, 70_000: 2, 139_999: 255})
    return {
        "nothing given": ([], {}),
        "nothing changed": ([_item("w", "BF16", (12,), small, small)], {}),
        "NaN payload, infinity, both zeros, changed signs": (
            [_item("w", "BF16", (3, 4), small, signs)],
            {},
        ),
        "differences up to 256 and beyond": (
            [_item("w", "F16", (12,), small, _changed(small, steps))],
            {},
        ),
        "gaps in 8 bits, with skips": ([sparse], {}),
        "gaps in 16 bits, with a skip": ([_item("w", "U8", (140_000,), far, gaps)], {}),
        "a bitmap": ([full], {}),
        "a bitmap, packed": ([full], {"zstd": True}),
        "values, not differences": ([sparse], {"absolute": True}),
        "0-dim": ([_item("w", "F32", (), np.zeros(1, "<f4"), np.full(1, -0.0, "<f4"))], {}),
        "dense": ([_item("w", "F8_E4M3", (4,), bytes_1[:4], bytes_1[4:])], {}),
        "eight bytes": (
            [_item("w", "F64", (6,), counted, _changed(counted, {4: 2**63 + 1}))],
            {},
        ),
        "half bytes": ([_item("w", "F4", (2000,), halves, _changed(halves, {999: 0x10}))], {}),
        "names that share their beginnings": (
            [
                _item("model.layers.0.up.weight", "BF16", (12,), small, signs),
                _item("model.layers.0.down.weight", "BF16", (12,), small, signs),
                _item("model.layers.0.up", "BF16", (12,), small, small),
                _item("model.layers.0.ä", "I8", (2,), np.zeros(2, "<i1"), np.ones(2, "<i1")),
                _item("empty", "F32", (0, 3), np.zeros(0, "<f4"), np.zeros(0, "<f4")),
            ],
            {},
        ),
        "names that share half a character": (
            [_item(name, "BF16", (12,), small, signs) for name in ("\u00e4", "\u00f6")],
            {},
        ),
    }


def _tensor(item: Item) -> dict[str, Any]:
    """Return a tensor as JSON."""
    return {
        "name": item.name,
        "dtype": item.dtype,
        "shape": list(item.shape),
        "base": _runs(item.base),
        "new": _runs(item.new),
    }


def _runs(data: Any) -> str:
    """Return hexadecimal digits; `(00)140000` stands for a byte that comes so often."""
    raw = data.tobytes()
    out, at = [], 0
    while at < len(raw):
        stop = at
        while stop < len(raw) and raw[stop] == raw[at]:
            stop += 1
        out.append(f"({raw[at]:02x}){stop - at}," if stop - at > 16 else raw[at:stop].hex())
        at = stop
    return "".join(out)


def accepted() -> list[dict[str, Any]]:
    found = []
    for index, (what, (items, options)) in enumerate(_cases().items()):
        zstd, absolute = options.get("zstd", False), options.get("absolute", False)
        with Encoder(zstd=zstd, absolute=absolute) as encoder:
            encoded = encoder.encode_shard(
                items, base_content_digest=BASE_DIGEST, layout_digest=LAYOUT_DIGEST, index=index
            )
        found.append(
            {
                "what": what,
                "index": index,
                "absolute": absolute,
                "exact": not zstd,
                "tensors": [_tensor(item) for item in items],
                "shard": encoded.blob.tobytes().hex(),
            }
        )
    return found + forged.legal(BASE_DIGEST, LAYOUT_DIGEST)


def _refused() -> list[dict[str, Any]]:
    """Return shards of one 0-dim tensor `w` of dtype U16 that are wrong in one way each."""
    item = _item("w", "U16", (), np.zeros(1, "<u2"), np.ones(1, "<u2"))
    good = encode_shard(
        [item], zstd=False, base_content_digest=BASE_DIGEST, layout_digest=LAYOUT_DIGEST, index=0
    ).blob.tobytes()
    start = 8 + int.from_bytes(good[:8], "little")
    wrong = {
        "a changed byte of the header": good[:20] + b"W" + good[21:],
        "a changed byte of the manifest": good[: start + 8] + b"\xff" + good[start + 9 :],
        "a changed byte of the values": good[:-1] + b"\xff",
        "cut": good[:-1],
        "longer": good + b"\0",
        "empty": b"",
    }
    for blob in wrong.values():
        try:
            parse_shard(memoryview(blob), {"w": ("U16", ())})
        except DeltaError:
            continue
        raise AssertionError("accepted a wrong shard")
    return [{"what": what, "shard": blob.hex()} for what, blob in wrong.items()]


def main() -> None:
    """Write the file."""
    document = {
        "base_content_digest": BASE_DIGEST,
        "layout_digest": LAYOUT_DIGEST,
        "accepted": accepted(),
        "refused": _refused(),
        "refused_tensors": {
            name: {"dtype": dtype, "shape": shape}
            for name, (dtype, shape) in forged.TENSORS.items()
        },
        "refused_with_right_checksums": forged.wrong(BASE_DIGEST, LAYOUT_DIGEST),
    }
    VECTORS.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
