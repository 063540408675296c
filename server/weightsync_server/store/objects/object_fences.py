"""Epochs and floors: who may commit, on a store that can only create keys.

A new writer creates `epochs/<n>`, lists the versions, and creates `floors/<n>` with the names of
those that count. A committer creates its record, then lists the epochs: either it finds no newer
one, and then the newer writer's list has the record; or it does, and then the floor decides. Who
finds an epoch without its floor makes it, so nobody waits for a writer that died. A floor is
created once, like everything here: all see the same.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightsync.errors import Reason, WeightSyncError
from weightsync_server.store.objects.object_keys import RecordName, numbered, record_name
from weightsync_server.store.protocol import check_epoch
from weightsync_server.store.store_records import decode_document, encode_document

if TYPE_CHECKING:
    from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts


class Floor(NamedTuple):
    """The records, `names`, that count of all epochs before `epoch`.

    `undecided` is a newer epoch whose floor is missing; 0 if there is none.
    """

    epoch: int
    names: frozenset[RecordName]
    undecided: int = 0

    def counts(self, name: RecordName) -> bool:
        return name in self.names or (name.epoch >= self.epoch and not self.undecided)


class ObjectFence:
    """The epochs of one model. With an empty `server` identity, it only reads."""

    def __init__(self, client: ObjectClient, model: str, server: str) -> None:
        self._client = client
        self._model = model
        self._server = server
        # The last epoch that this server is known to have, which it has for ever.
        self._ours = -1

    async def newest(self) -> int:
        """Return the newest epoch; 0: nobody acquired one."""
        return max(await self._numbers("epochs") + await self._numbers("floors"), default=0)

    async def holder(self) -> str:
        """Return the server that has the newest epoch; empty: none is known to."""
        newest = await self.newest()
        body = await self._client.get(self._key("epochs", newest))
        return str(self._read("epochs", newest, body).get("server")) if body is not None else ""

    async def acquire(self, epoch: int) -> None:
        """Make an epoch the newest: when this returns, no older writer can commit any more."""
        await self._take(epoch)
        await self.floor()

    async def claim(self, epoch: int) -> None:
        """Check that this server has an epoch, and take it if it is the first to ask.

        Raises EPOCH_STALE when another server has it, or there is a newer one. Epoch 0, which
        nobody acquires, goes to the first that commits, folds or removes.
        """
        if epoch != self._ours:
            await self._take(epoch)

    async def _take(self, epoch: int) -> None:
        newest = await self.newest()
        check_epoch(epoch, newest)
        ours, key = encode_document({"server": self._server}), self._key("epochs", epoch)
        # Of one that counted already it must be known who has it.
        was = 0 < epoch == newest
        found = await (self._client.get(key) if was else self._client.create(key, ours))
        if found is None:
            raise WeightSyncError(
                Reason.DATA_CORRUPT, f"{key} was removed; restore it, or acquire a new epoch"
            )
        if self._read("epochs", epoch, found).get("server") != self._server:
            raise WeightSyncError(
                Reason.EPOCH_STALE,
                f"epoch {epoch} of {self._model} belongs to another server that uses this store; "
                "continue through that server, or acquire an epoch here to take over",
                metadata={"epoch": str(epoch)},
            )
        self._ours = epoch

    async def records(self) -> dict[RecordName, ObjectFacts]:
        """Return all records by name, whether they count or not."""
        prefix = f"{self._model}/versions"
        listed = (await self._client.list_under(prefix)).items()
        found = ((record_name(key[len(prefix) + 1 :]), facts) for key, facts in listed)
        return {name: facts for name, facts in found if name is not None}

    async def floor(self) -> Floor:
        """Return the newest floor, making those that are missing.

        What it tells of a record that was listed before is final, unless that is undecided.
        """
        floors, epochs = await self._numbers("floors"), await self._numbers("epochs")
        last = await self._floor(max(floors)) if floors else Floor(0, frozenset())
        for epoch in sorted(epoch for epoch in epochs if epoch > last.epoch):
            if not self._server:
                return last._replace(undecided=epoch)
            last = await self._make(epoch, last)
        return last

    async def _make(self, epoch: int, last: Floor) -> Floor:
        names = {n for n in await self.records() if n.epoch < epoch and last.counts(n)}
        body = encode_document({"versions": [name.path for name in sorted(names)]})
        found = await self._client.create(self._key("floors", epoch), body)
        return self._parsed(epoch, found)

    async def _floor(self, epoch: int) -> Floor:
        key = self._key("floors", epoch)
        if (body := await self._client.get(key)) is None:
            raise WeightSyncError(Reason.DATA_CORRUPT, f"{key} was removed; restore the store")
        return self._parsed(epoch, body)

    def _parsed(self, epoch: int, body: bytes) -> Floor:
        paths = self._read("floors", epoch, body).get("versions")
        names = [record_name(str(path)) for path in paths] if isinstance(paths, list) else [None]
        if None in names:
            raise _damaged(self._key("floors", epoch))
        return Floor(epoch, frozenset(name for name in names if name is not None))

    def _read(self, folder: str, number: int, body: bytes) -> dict[str, object]:
        try:
            return decode_document(body)
        except ValueError as error:
            raise _damaged(self._key(folder, number)) from error

    async def _numbers(self, folder: str) -> list[int]:
        found = map(numbered, await self._client.list_under(f"{self._model}/{folder}"))
        return [number for number in found if number is not None]

    def _key(self, folder: str, number: int) -> str:
        return f"{self._model}/{folder}/{number}.json"


def _damaged(key: str) -> WeightSyncError:
    return WeightSyncError(
        Reason.DATA_CORRUPT, f"{key} is damaged; restore it from another copy of the store"
    )
