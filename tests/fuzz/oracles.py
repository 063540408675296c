"""What must hold for any bytes that reach a parser; an AssertionError tells where it does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import safetensors
from google.protobuf.message import DecodeError

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.layout import check_header, check_shard, check_version, parse_header
from weightsync.model.manifest import Layout, Manifest, ShardEntry, TensorEntry
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.push.validation import tensor_entries

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["check_file", "check_part", "layout_of_file"]

_REFUSALS = (Reason.LAYOUT_INVALID, Reason.SHARD_INVALID)
#: Data sections up to this many bytes are made, so that the other package can read the file.
_MOST_DATA = 1 << 16


def check_file(file: bytes) -> bool:
    """Return whether the server would take a shard file; if so the safetensors package does too."""
    try:
        layout = layout_of_file(file)
    except WeightSyncError as error:
        _check_refusal(error)
        return False
    _compare(file, layout.tensors)
    _check_manifest(layout)
    return True


def layout_of_file(file: bytes) -> Layout:
    """Return what the server makes of a whole shard file.

    Raises:
        WeightSyncError: It refuses the file.
    """
    size = int.from_bytes(file[:8], "little")
    shard = ShardEntry("shard", len(file), size)
    # The server never parses a header whose declared length was not checked.
    if not 2 <= size <= len(file) - 8:
        check_shard(shard, [])
    header = file[8 : 8 + size]
    tensors = check_shard(shard, parse_header(header))
    check_header(header, tensors)
    return check_version([shard], [tensors])


def check_part(message: bytes) -> bool:
    """Return whether the server would take a layout; if so a file of it is legal everywhere."""
    try:
        part = pb.LayoutPart.FromString(message)
    except DecodeError:
        return False
    try:
        shard = ShardEntry(part.shard_name, part.size_bytes, part.header_bytes)
        tensors = check_shard(shard, tensor_entries(part))
        layout = check_version([shard], [tensors])
    except WeightSyncError as error:
        _check_refusal(error)
        return False
    header = _header(tensors)
    check_header(header, tensors)
    size = tensors[-1].end
    if size <= _MOST_DATA:
        _compare(len(header).to_bytes(8, "little") + header + bytes(size), tensors)
    _check_manifest(layout)
    return True


def _check_refusal(error: WeightSyncError) -> None:
    assert error.reason in _REFUSALS, error.reason
    assert len(error.message) < 2000, len(error.message)
    assert error.message.isascii(), ascii(error.message)
    assert error.message.isprintable(), ascii(error.message)


def _compare(file: bytes, ours: tuple[TensorEntry, ...]) -> None:
    found = dict(_theirs(file))
    assert found.keys() == {tensor.name for tensor in ours}
    for tensor in ours:
        theirs = found[tensor.name]
        assert theirs["dtype"] == tensor.dtype, tensor
        assert tuple(theirs["shape"]) == tensor.shape, tensor
        start = 8 + int.from_bytes(file[:8], "little")
        assert bytes(theirs["data"]) == file[start + tensor.begin : start + tensor.end], tensor


def _theirs(file: bytes) -> list[tuple[str, Any]]:
    try:
        deserialize: Callable[[bytes], list[tuple[str, Any]]] = safetensors.deserialize
        return deserialize(file)
    except safetensors.SafetensorError as error:
        raise AssertionError(f"accepted what the safetensors package refuses: {error}") from error


def _check_manifest(layout: Layout) -> None:
    manifest = Manifest(layout, tuple(bytes(16) for _ in layout.tensors))
    again = Manifest.from_json(manifest.to_json())
    assert again.manifest_digest == manifest.manifest_digest
    assert again.layout.signature == layout.signature


def _header(tensors: tuple[TensorEntry, ...]) -> bytes:
    document = {
        tensor.name: {
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [tensor.begin, tensor.end],
        }
        for tensor in tensors
    }
    return json.dumps(document).encode()
