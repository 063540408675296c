"""A store in a bucket. Several servers may use it: epochs and floors say which of them commits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Coroutine, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Manifest
from weightsync_server.ops.tasks import to_end
from weightsync_server.store.objects.model_objects import ModelObjects
from weightsync_server.store.objects.object_catalog import StoredForm
from weightsync_server.store.objects.object_client import ObjectClient
from weightsync_server.store.objects.object_keys import MARKER, shard_key
from weightsync_server.store.objects.piece_digests import PieceDigests
from weightsync_server.store.protocol import MODEL_NAME, check_model, check_version
from weightsync_server.store.store_records import (
    CommitRecord,
    OpenPush,
    PushRecord,
    based,
    decode_document,
    encode_document,
)


async def claim(client: ObjectClient, kind: str = "store", marker: str = MARKER) -> None:
    """Make a place a store of ours by the object `marker`, or find that it is one.

    `kind` names the store in errors.
    """
    ours = encode_document({"format": 1})
    body = await client.get(marker)
    if body is None:
        # Another server may have made it a store meanwhile.
        if not await client.is_empty() and (body := await client.get(marker)) is None:
            raise WeightSyncError(
                Reason.REQUEST_INVALID,
                f"{client.url} is not a WeightSync {kind}, and not empty; name a prefix that "
                "nothing else uses",
            )
        body = body or await client.create(marker, ours)
    try:
        known = decode_document(body).get("format")
    except ValueError:
        known = None
    if known != 1:
        raise WeightSyncError(
            Reason.NOT_SUPPORTED,
            f"{client.url}/{marker} has format {known!r}: it is damaged, or of a newer release of "
            "this server; use that release",
        )


async def probe(client: ObjectClient) -> None:
    """Refuse a store that creates a key which exists: two writers would both have committed."""
    # No model has such a name.
    key, first = f"_probe/{secrets.token_hex(16)}", b"first"
    try:
        await client.try_create(key, first)
        again = await client.try_create(key, b"second")
        if again or await client.get(key) != first:
            raise WeightSyncError(
                Reason.NOT_SUPPORTED,
                f"the store at {client.url} wrote over an object although it was asked to create "
                "it only where there is none (If-None-Match: *); use a store that keeps this "
                "promise, such as Amazon S3, Google Cloud Storage, Azure or MinIO",
            )
    finally:
        await client.delete([key])


_T = TypeVar("_T")


class ObjectStore:
    """Keeps versions in a bucket that this server may share with others.

    A cancelled call ends first, then raises. A commit that raises FAULT may have made its version
    exist, whole; committing it again finds it. Open pushes of servers other than `server` are left
    alone; if it is empty, nothing is written.
    """

    durable = True
    local = False

    def __init__(self, url: str, server: str = "") -> None:
        self._client = ObjectClient(url)
        self._server = server
        self.url = self._client.url
        self.lost: list[str] = []
        self._models: dict[str, ModelObjects] = {}

    async def open(self) -> list[CommitRecord]:
        await claim(self._client)
        await probe(self._client)
        records: list[CommitRecord] = []
        self.lost = []
        for name in await self._client.folders():
            if MODEL_NAME.fullmatch(name):
                good, lost = await self._opened(name)
                records += good
                self.lost += lost
        return records

    async def _opened(self, name: str) -> tuple[list[CommitRecord], list[str]]:
        model = self._of(name)
        async with model.lock:
            found = await self._whole(name)
            await model.sweep()
        return found

    async def _whole(self, name: str) -> tuple[list[CommitRecord], list[str]]:
        """Return the versions that can be read, and a sentence for each other one."""
        model = self._of(name)
        await model.catalog.refresh()
        lost = await model.lost()
        known = model.catalog.known
        good, unbased = based(known[n].record for n in sorted(known) if n not in lost)
        why = "its base is missing or different"
        others = [f"{name}/v{record.version} is damaged ({why})" for record in unbased]
        return good, [*lost.values(), *others]

    def free_bytes(self) -> int:
        return 1 << 62

    def shard_path(self, model: str, version: int, shard: int, *, delta: bool = False) -> str:
        """Return the place to load a committed shard from, or to persist one with its receipt."""
        of = self._of(model, version)
        if type(shard) is not int or shard < 0:
            raise WeightSyncError(
                Reason.REQUEST_INVALID, f"shard must be a whole number from 0, not {shard!r}"
            )
        form = self._form(model, version, delta=delta)
        if form is not None and shard < len(form.shards):
            return f"{self.url}/{shard_key(model, form.shards[shard])}"
        if not self._server:
            raise WeightSyncError(
                Reason.VERSION_UNKNOWN,
                f"version {version} of {model} is no longer in {self.url}, or in another form; "
                "the server looks for it again",
            )
        return f"{self.url}/{of.pushes.receipt_key(version, shard, delta=delta)}"

    def pieces(
        self, model: str, version: int, shard: int, *, delta: bool = False
    ) -> PieceDigests | None:
        form = self._form(model, version, delta=delta)
        return form.pieces[shard] if form is not None and form.pieces else None

    def _form(self, model: str, version: int, *, delta: bool) -> StoredForm | None:
        known = self._of(model).catalog.known.get(version)
        return None if known is None else known.delta if delta else known.full

    async def commit(
        self, record: CommitRecord, manifest: Manifest, delta: Manifest | None = None
    ) -> None:
        model = self._of(record.model, record.version)
        await self._change(model, model.commit(record, manifest, delta))

    async def fold(self, record: CommitRecord, manifest: Manifest) -> None:
        model = self._of(record.model, record.version)
        await self._change(model, model.fold(record, manifest))

    async def discard(self, model: str, version: int) -> None:
        """Forget a failed push; the bytes of its shards stay until the store is swept."""
        of = self._of(model, version)
        await self._change(of, of.pushes.forget(version))

    async def manifest(self, model: str, version: int) -> Manifest:
        return await self._of(model, version).manifest(version, delta=False)

    async def delta(self, model: str, version: int) -> Manifest:
        return await self._of(model, version).manifest(version, delta=True)

    async def tidy(self, model: str, version: int) -> None:
        of = self._of(model, version)
        await self._change(of, of.pushes.forget_receipts(version, delta=False))

    async def delete(self, model: str, version: int) -> None:
        of = self._of(model, version)
        await self._change(of, of.delete(version))

    async def committed_elsewhere(self, model: str) -> list[CommitRecord]:
        return await self.committed(model)

    async def committed(self, model: str) -> list[CommitRecord]:
        # Nothing is changed, so it may be called off at once.
        async with self._of(model).lock:
            found, _ = await self._whole(model)
        return found

    async def stamps(self, model: str) -> frozenset[str]:
        """Return what changes with the versions that exist, for two requests."""
        return await self._of(model).catalog.stamps()

    async def collects(self, model: str) -> bool:
        return await self._of(model).collects()

    async def read_epoch(self, model: str) -> int:
        return await self._of(model).fence.newest()

    async def write_epoch(self, model: str, epoch: int) -> None:
        await self._change(self._of(model), self._of(model).fence.acquire(epoch))

    async def read_marks(self, model: str) -> dict[str, Any]:
        """Return what `write_marks` wrote last, on any server; empty before the first."""
        body = await self._client.get(f"{check_model(model)}/marks.json")
        try:
            return decode_document(body) if body is not None else {}
        except ValueError as error:
            raise WeightSyncError(
                Reason.DATA_CORRUPT,
                f"the marks of {model} are damaged ({error}); delete {model}/marks.json",
            ) from error

    async def write_marks(self, model: str, marks: Mapping[str, Any]) -> None:
        body = encode_document(dict(marks))
        put = self._client.put(f"{check_model(model)}/marks.json", body)
        await self._change(self._of(model), put)

    async def record_push(self, record: PushRecord) -> None:
        model = self._of(record.model, record.version)
        await self._change(model, self._record_push(model, record))

    async def _record_push(self, model: ModelObjects, record: PushRecord) -> None:
        # Better now than at the commit of all that was sent.
        await model.fence.claim(record.epoch)
        if await model.catalog.find(record.version) is not None:
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"version {record.version} of {record.model} was pushed through another server "
                "that uses this store; push it as a higher version",
            )
        await model.pushes.record(replace(record, server=self._server))

    async def open_pushes(self, model: str) -> list[OpenPush]:
        of = self._of(model)
        return await of.pushes.open(set(of.catalog.known))

    def _of(self, model: str, version: int | None = None) -> ModelObjects:
        """Return the objects of a model; the number is checked, where one is given."""
        if version is not None:
            check_version(version)
        if model not in self._models:
            self._models[model] = ModelObjects(self._client, check_model(model), self._server)
        return self._models[model]

    async def _change(self, model: ModelObjects, work: Coroutine[Any, Any, _T]) -> _T:
        try:
            async with model.lock:
                return await to_end(asyncio.ensure_future(work))
        finally:
            # Of a caller who was cancelled while it waited for its turn.
            work.close()
