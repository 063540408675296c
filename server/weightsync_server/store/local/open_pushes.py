"""What a local store keeps of pushes that are not committed, so that they survive a crash.

<version>/push.json                 who pushes what
<version>/<shard>.safetensors       the bytes of a shard that came so far; of a delta: delta-<shard>
<version>/<shard>.safetensors.kept  which of them are there (see `checkpoint_index`)
"""

from __future__ import annotations

import contextlib
import logging
import re
from pathlib import Path

from weightsync import failpoints
from weightsync.errors import WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_shard, parse_header
from weightsync_server.ops import durable_files
from weightsync_server.store import checkpoint_index
from weightsync_server.store.store_records import (
    OpenPush,
    PushRecord,
    ShardCheckpoint,
    read_document,
)

logger = logging.getLogger(__name__)

RECORD = "push.json"

_SHARD = re.compile(r"(delta-)?(0|[1-9][0-9]{0,5})\.safetensors")


def is_partial(path: Path) -> bool:
    return path.name == RECORD or path.name.endswith(checkpoint_index.SUFFIX)


def read_push(directory: Path) -> PushRecord | None:
    try:
        record = PushRecord.from_json(read_document(directory / RECORD))
    except FileNotFoundError:
        return None
    except ValueError as error:
        logger.warning("the record of a push in %s is damaged: %s", directory, error)
        return None
    same = (record.model, f"v{record.version}") == (directory.parent.name, directory.name)
    return record if same else None


def is_foreign(record: PushRecord | None, server: str) -> bool:
    return record is not None and record.server not in ("", server)


def forget_push(directory: Path) -> None:
    """Remove what only the push of a committed version needed, or leave it to the next start."""
    with contextlib.suppress(OSError):
        failpoints.hit("store.recorded")
        for path in directory.iterdir():
            if is_partial(path):
                durable_files.unlink(path)


def open_pushes(model: Path, commit: str, server: str) -> list[OpenPush]:
    """Return every push of a server in a model's directory, neither committed nor dropped.

    `commit` is the name of commit records.
    """
    if not model.is_dir():
        return []
    found = []
    for directory in sorted(path for path in model.iterdir() if path.is_dir()):
        record = None if (directory / commit).exists() else read_push(directory)
        if record is not None and not is_foreign(record, server):
            shards = [_kept_shard(path, delta=record.delta) for path in directory.iterdir()]
            found.append(OpenPush(record, tuple(shard for shard in shards if shard is not None)))
    return found


def _kept_shard(path: Path, *, delta: bool) -> ShardCheckpoint | None:
    match = _SHARD.fullmatch(path.name)
    if match is None or bool(match[1]) != delta:
        return None
    try:
        index = checkpoint_index.read(str(path))
        if index.end < index.entry.data_start:
            return None
        with path.open("rb") as file:
            header = file.read(index.entry.data_start)[8:]
        if tensor_digest(header).hex() != index.header_digest:
            raise ValueError("its header is damaged")
        tensors = check_shard(index.entry, parse_header(header, int(match[2])))
    except (OSError, ValueError, WeightSyncError) as error:
        logger.warning(
            "a shard of an open push has to be sent again, since what was kept of it in %s cannot "
            "be used: %s",
            path,
            error,
        )
        return None
    return ShardCheckpoint(int(match[2]), index.entry, tensors, tensor_digest(header), index.end)
