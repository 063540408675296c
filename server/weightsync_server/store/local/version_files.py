"""The files of a version: their names, and the record that tells which must be there.

The record names the files of one form: in full (`<shard>.safetensors`) or as a change
(`delta-<shard>.safetensors`, `delta.json`). Files of the other form are left over from a fold that
a crash interrupted.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import xxhash

from weightsync import failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.ops import durable_files
from weightsync_server.store.local.open_pushes import is_partial
from weightsync_server.store.store_records import TEMPORARY, CommitRecord, read_document, replace

COMMIT = "commit.json"
MANIFEST = "manifest.json"
#: The manifest of the delta shards.
DELTA = "delta.json"

_OURS = re.compile(rf"(delta-)?[0-9]+\.safetensors|delta\.json|.*{re.escape(TEMPORARY)}")


def shard_name(shard: int, *, delta: bool = False) -> str:
    if type(shard) is not int or shard < 0:
        raise WeightSyncError(Reason.REQUEST_INVALID, f"shard {shard!r} is not an index")
    return f"{'delta-' if delta else ''}{shard}.safetensors"


def shard_names(manifest: Manifest, *, delta: bool = False) -> dict[str, int]:
    entries = enumerate(manifest.layout.shards)
    return {shard_name(index, delta=delta): entry.size for index, entry in entries}


def write_manifests(
    directory: Path, manifest: Manifest, delta: Manifest | None
) -> tuple[bytes, bytes]:
    bodies = manifest.to_json(), delta.to_json() if delta is not None else b""
    # Also flushes the names of the shards, which are in the same directory.
    failpoints.hit("store.manifest")
    if delta is not None:
        replace(directory / DELTA, bodies[1])
    replace(directory / MANIFEST, bodies[0])
    return bodies


def commit_document(
    record: CommitRecord, shards: Mapping[str, int], manifest: bytes, delta: bytes
) -> dict[str, Any]:
    """Return the commit record as stored; `delta` is empty for what is kept in full."""
    document = {
        "format": 1,
        "record": record.to_json(),
        "manifest_bytes": len(manifest),
        "manifest_xxh3_128": xxhash.xxh3_128_hexdigest(manifest),
        "shard_bytes": [] if delta else list(shards.values()),
    }
    if delta:
        document |= {
            "delta_bytes": list(shards.values()),
            "delta_manifest_bytes": len(delta),
            "delta_manifest_xxh3_128": xxhash.xxh3_128_hexdigest(delta),
        }
    return document


def lengths(document: Mapping[str, Any]) -> dict[str, int]:
    """Return the lengths of the files that a stored commit record names; KeyError: incomplete."""
    found = {shard_name(index): size for index, size in enumerate(document["shard_bytes"])}
    found[MANIFEST] = document["manifest_bytes"]
    if "delta_bytes" in document:
        sizes = enumerate(document["delta_bytes"])
        found |= {shard_name(index, delta=True): size for index, size in sizes}
        found[DELTA] = document["delta_manifest_bytes"]
    return found


def check_files(directory: Path, record: CommitRecord, expected: Mapping[str, int]) -> None:
    lacking = []
    for name, size in expected.items():
        try:
            status = (directory / name).lstat()
        except FileNotFoundError:
            lacking.append(f"{name} is missing")
            continue
        if not stat.S_ISREG(status.st_mode) or status.st_size != size:
            lacking.append(f"{name} has {status.st_size} of {size} bytes")
    if lacking:
        raise WeightSyncError(
            Reason.PUSH_INCOMPLETE,
            f"version {record.version} of {record.model} is not whole in the store: "
            f"{'; '.join(lacking[:10])}; push it again",
        )


def read_manifest(directory: Path, name: str = MANIFEST) -> Manifest:
    """Return a manifest, proved by the digest in the commit record; ValueError: damaged."""
    commit = read_document(directory / COMMIT)
    body = (directory / name).read_bytes()
    expected = commit.get("manifest_xxh3_128" if name == MANIFEST else "delta_manifest_xxh3_128")
    if xxhash.xxh3_128_hexdigest(body) != expected:
        raise ValueError("its digest does not match the commit record")
    return Manifest.from_json(body)


def remove_unnamed(directory: Path, named: Mapping[str, int], *, partial: bool) -> None:
    """Remove all files of a version but those in `named`; with `partial` an open push's too."""
    for path in directory.iterdir():
        if is_partial(path):
            if partial:
                durable_files.unlink(path)
        elif path.name not in named and _OURS.fullmatch(path.name):
            durable_files.unlink(path)
