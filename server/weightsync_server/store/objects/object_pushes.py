"""What an object store keeps of pushes that are open: each server finds its own.

<model>/pushes/<server>/<version>/push.json       who pushes what
<model>/pushes/<server>/<version>/[delta-]<shard>  receipt of a whole shard that was uploaded
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

from weightsync.errors import WeightSyncError
from weightsync.model.digest import tensor_digest
from weightsync.model.layout import check_shard, parse_header
from weightsync_server.store.objects.object_keys import ShardName, shard_key
from weightsync_server.store.objects.piece_digests import ShardReceipt
from weightsync_server.store.store_records import (
    OpenPush,
    PushRecord,
    ShardCheckpoint,
    decode_document,
    encode_document,
)

if TYPE_CHECKING:
    from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts


logger = logging.getLogger(__name__)

_RECORD = "push.json"
_SHARD = re.compile(r"(delta-)?(0|[1-9][0-9]{0,5})")


class ObjectPushes:
    def __init__(self, client: ObjectClient, model: str, server: str) -> None:
        self._client = client
        self._model = model
        self._all = f"{model}/pushes"
        self._ours = f"{self._all}/{server}"

    def receipt_key(self, version: int, shard: int, *, delta: bool) -> str:
        return f"{self._ours}/{version}/{'delta-' if delta else ''}{shard}"

    async def record(self, record: PushRecord) -> None:
        key = f"{self._ours}/{record.version}/{_RECORD}"
        await self._client.put(key, encode_document(record.to_json()))

    async def receipts(self, version: int, *, delta: bool) -> dict[int, ShardReceipt]:
        prefix = f"{self._ours}/{version}"
        indexes = {}
        for key in await self._client.list_under(prefix):
            match = _SHARD.fullmatch(key[len(prefix) + 1 :])
            if match is not None and bool(match[1]) == delta:
                indexes[key] = int(match[2])
        bodies = await self._client.get_all(list(indexes))
        found = {indexes[key]: _receipt(key, body) for key, body in bodies.items()}
        return {index: receipt for index, receipt in found.items() if receipt is not None}

    async def forget(self, version: int) -> None:
        """Remove all that is known of a push; the bytes of its shards are the collector's."""
        await self._client.delete(list(await self._client.list_under(f"{self._ours}/{version}")))

    async def forget_receipts(self, version: int, *, delta: bool) -> None:
        indexes = await self.receipts(version, delta=delta)
        keys = [self.receipt_key(version, index, delta=delta) for index in indexes]
        await self._client.delete(keys)

    async def open(self, committed: set[int]) -> list[OpenPush]:
        """Return the pushes of this server whose version does not exist; others are removed."""
        found = []
        for version in sorted(await self._versions()):
            body = await self._client.get(f"{self._ours}/{version}/{_RECORD}")
            try:
                record = PushRecord.from_json(decode_document(body or b"{}"))
            except ValueError as error:
                logger.warning(
                    "the record of the open push of version %d cannot be read (%s); it has to be "
                    "begun again",
                    version,
                    error,
                )
                record = None
            if record is None or record.version != version or version in committed:
                await self.forget(version)
                continue
            receipts = await self.receipts(version, delta=record.delta)
            shards = [await self._checkpoint(*pair) for pair in sorted(receipts.items())]
            found.append(OpenPush(record, tuple(shard for shard in shards if shard is not None)))
        return found

    async def all_receipts(self) -> tuple[set[ShardName], dict[str, ObjectFacts]]:
        """Return the shards that open pushes of any server need, and the objects that tell it."""
        keys = await self._client.list_under(self._all)
        wanted = [key for key in keys if not key.endswith(_RECORD)]
        found = (_receipt(*pair) for pair in (await self._client.get_all(wanted)).items())
        return {receipt.object for receipt in found if receipt is not None}, keys

    async def _versions(self) -> set[int]:
        keys = await self._client.list_under(self._ours)
        parts = (key[len(self._ours) + 1 :].partition("/")[0] for key in keys)
        return {int(part) for part in parts if part.isascii() and part.isdecimal()}

    async def _checkpoint(self, index: int, receipt: ShardReceipt) -> ShardCheckpoint | None:
        entry = receipt.entry
        if not entry.header_size:
            return None
        try:
            key = shard_key(self._model, receipt.object)
            header = (await self._client.get_begin(key, entry.data_start))[8:]
            if tensor_digest(header).hex() != receipt.header_digest:
                raise ValueError("its header is damaged")
            tensors = check_shard(entry, parse_header(header, index))
        except (ValueError, WeightSyncError) as error:
            logger.warning(
                "shard %d of an open push has to be sent again, since what was kept of it cannot "
                "be used: %s",
                index,
                error,
            )
            return None
        return ShardCheckpoint(index, entry, tensors, tensor_digest(header), entry.size)


def _receipt(key: str, body: bytes) -> ShardReceipt | None:
    try:
        return ShardReceipt.decode(body)
    except ValueError as error:
        logger.warning(
            "%s is no record of a received shard (%s); the shard has to be sent again", key, error
        )
        return None
