"""Writes the first inputs of the corpus: legal ones, and one for each rule of the format."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from tests.fuzz.deltas import EXPECT
from tests.fuzz.limits import MAX_BYTES
from tests.fuzz.messages import field, number
from tests.unit.delta.cases import changed_item, encode
from weightsync.model.dtypes import DTYPE_BITS
from weightsync.model.layout import build_header
from weightsync.v1 import weightsync_pb2 as pb

CORPUS = Path(__file__).with_name("corpus")


def _file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def _tensor(shape: Any = (4,), offsets: Any = (0, 4), dtype: Any = "U8") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def files() -> list[bytes]:
    """Return safetensors files."""
    one = json.dumps({"a": _tensor()}).encode()
    specs = [(f"layer.{dtype}", dtype, (8, 2)) for dtype in DTYPE_BITS]
    header, places = build_header(specs)
    documents: list[dict[str, Any]] = [
        {"a": _tensor(), "b": _tensor(offsets=(4, 8))},
        {"a": _tensor(), "b": _tensor(offsets=(3, 7))},
        {"a": _tensor(), "b": _tensor(offsets=(5, 9))},
        {"a": _tensor(shape=(0, 1 << 62), offsets=(0, 0))},
        {"a": _tensor(shape=(1 << 32, 1 << 32), offsets=(0, 0))},
        {"a": _tensor(shape=(), offsets=(0, 1))},
        {"__metadata__": {"format": "pt"}, "a": _tensor()},
        {"__metadata__": {"format": 1}, "a": _tensor()},
        {"a": _tensor() | {"more": 1}},
        {"\u202e": _tensor()},
        {},
    ]
    return [
        _file(header, bytes(places[-1].end)),
        _file(one, bytes(4)),
        _file(b" " + one, bytes(4)),
        _file(one[:-1] + b"," + one[1:], bytes(4)),
        _file(one + b"   ", bytes(4)),
        _file(b"[" * 2000),
        _file(b'{"a":' * 500),
        *(_file(json.dumps(document).encode(), bytes(8)) for document in documents),
    ]


def parts() -> list[bytes]:
    """Return serialised layout parts."""
    found = []
    for count in (0, 1, 3):
        part = pb.LayoutPart(shard_name="s", header_bytes=100, last=True)
        for at in range(count):
            begin = at * 8
            part.tensors.add(name=f"t{at}", dtype="BF16", shape=[2, 2], begin=begin, end=begin + 8)
        part.size_bytes = 108 + 8 * count
        found.append(part.SerializeToString())
    return found


def shards() -> list[bytes]:
    """Return delta shards of the tensors that the oracle knows, and one of others."""
    found = []
    for density in (0.0, 0.0005, 0.02, 0.4, 1.0):
        items = [
            changed_item(name, dtype, shape, density, ulp=density < 1, seed=len(name))
            for name, (dtype, shape) in EXPECT.items()
        ]
        for zstd in (False, True):
            for absolute in (False, True):
                blob = encode(items, zstd=zstd, absolute=absolute).blob.tobytes()
                found += [blob] if len(blob) <= MAX_BYTES else []
    stranger = encode([changed_item("stranger", "U8", (9,), 1.0)]).blob.tobytes()
    return list(dict.fromkeys([*found, stranger, stranger[:-1], b""]))


def messages() -> list[bytes]:
    """Return messages of a push: plain chunks, chunks that are not plain, and others."""
    chunk = number(1, 7) + number(2, 1 << 40) + field(3, b"data")
    request = pb.PushWeightsRequest
    return [
        field(4, chunk),
        field(4, field(3, bytes(1000))),
        field(4, number(2, 1) + number(1, 2) + field(3, b"x")),
        field(4, number(1, 2) + number(1, 3) + field(3, b"x")),
        field(4, chunk + number(9, 1)),
        field(4, number(1, 1 << 32) + field(3, b"x")),
        field(4, number(2, (1 << 64) - 1) + field(3, b"x")),
        field(4, b"\x08\x87\x00" + field(3, b"x")),
        field(4, chunk) + field(4, field(3, b"again")),
        field(4, chunk) + request(heartbeat=pb.Heartbeat()).SerializeToString(),
        field(4, chunk)[:-1],
        field(4, b""),
        b"",
        request(join=pb.JoinPush(push_id="a")).SerializeToString(),
        request(commit=pb.CommitPushRequest(shard_count=1)).SerializeToString(),
    ]


def main() -> None:
    """Write each input to a file named after its digest."""
    targets = {"header": files, "layout": parts, "delta": shards, "message": messages}
    for target, inputs in targets.items():
        folder = CORPUS / target
        folder.mkdir(parents=True, exist_ok=True)
        for data in inputs():
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)


if __name__ == "__main__":
    main()
