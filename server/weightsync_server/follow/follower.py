"""The loop of a follower: what is newest in the origin, or wanted, is fetched and kept here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING

from weightsync import clock, failpoints
from weightsync.errors import Reason, WeightSyncError
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.local_numbers import FIRST_LOCAL
from weightsync_server.follow.fetch_plan import Fetch, fetch_plan
from weightsync_server.follow.fetch_push import begin_request, push_key
from weightsync_server.follow.newest_staging import NewestStaging
from weightsync_server.follow.wanted_version import Wanted
from weightsync_server.ops.os_errors import to_refusal

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator, Sequence
    from typing import Any

    from weightsync_server.catalog.record import VersionRecord
    from weightsync_server.follow.follow_metrics import FollowMetrics
    from weightsync_server.follow.origin import Origin
    from weightsync_server.model import Model
    from weightsync_server.push import PushService
    from weightsync_server.push.parts import Push
    from weightsync_server.store.store_records import CommitRecord

__all__ = ["Follower"]

logger = logging.getLogger(__name__)

#: From a failure to the next try, seconds: doubled each time.
_AGAIN_S, _MOST_S = 0.5, 30.0
#: Longest wait for the origin's answer about one content, seconds.
_FIND_S = 10.0
#: Longest wait for an engine's checkpoint that is becoming the version to fetch, seconds.
_ADOPT_S = 60.0
#: What is to be done where numbers mean other content here than in the origin.
_WAYS_ON = (
    "push a higher version there; or, where nobody needs what is here, give this follower an empty "
    "--state-dir"
)
#: Failures after which the same push goes on: nothing that came is wrong.
_PASSING = frozenset(
    {
        Reason.FAULT,
        Reason.FETCHER_FAILED,
        Reason.SHUTTING_DOWN,
        Reason.SERVER_AWAY,
        Reason.DEADLINE_EXCEEDED,
        Reason.NO_SLOT,
        Reason.LIMIT_EXCEEDED,
    }
)


class Follower:
    """Keeps the newest version of an origin here, staged, under its number and with its digests.

    Besides, what somebody wants, one version at a time. What cannot be had, or is not what it
    should be, becomes no version; it is tried again.

    Args:
        origin: Where versions come from; closed with this.
        model: Where they go.
        pushes: Receives, proves and commits each of them, as it does what a trainer pushes.
        metrics: What is counted.

    Attributes:
        url: Of the origin.
    """

    def __init__(
        self, origin: Origin, model: Model, pushes: PushService, metrics: FollowMetrics
    ) -> None:
        self.url = origin.url
        self._origin = origin
        self._model = model
        self._pushes = pushes
        self._metrics = metrics
        #: Content of versions whose delta has failed: the next try is in full.
        self._distrusted: set[str] = set()
        self._warned: set[str] = set()
        self._complaint = ""
        self._newest = NewestStaging(model, self._fetch_again)
        self._fetched_again = 0
        self._damaged = asyncio.Event()
        self._wanted: list[Wanted] = []
        self._asked = asyncio.Event()
        model.table.on_damage.append(self._on_damage)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to follow."""
        self._task = asyncio.create_task(self._run(), name="follow")

    async def stop(self) -> None:
        """Follow no more. What has come of a version stays and goes on after a restart."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        await self._origin.close()

    @contextlib.contextmanager
    def wanting(self, version: int, content_digest: str = "") -> Iterator[None]:
        """Fetch a version before the newest, at once, also after a failure, until the block ends.

        Of several that are wanted, one after the other.

        Args:
            version: Its number.
            content_digest: Its content; empty: what the origin has under that number.
        """
        wanted = Wanted(version, content_digest)
        self._wanted.append(wanted)
        self._asked.set()
        try:
            yield
        finally:
            self._wanted.remove(wanted)

    async def lacking(self, version: int, content_digest: str = "") -> WeightSyncError | None:
        """Return why a version will not come; None: it may, also if the origin cannot be asked.

        Args:
            version: As for `wanting`.
            content_digest: As for `wanting`.
        """
        wanted = Wanted(version, content_digest)
        end = clock.monotonic() + self._origin.patience_s
        while True:
            try:
                async with asyncio.timeout(_FIND_S):
                    versions = await self._versions()
            except (WeightSyncError, TimeoutError):
                return None
            if (found := wanted.among(versions)) is not None:
                return self._conflict(found)
            if clock.monotonic() >= end:
                return wanted.refusal(versions, self.url)
            await asyncio.sleep(_AGAIN_S)

    async def find(self, content_digest: str) -> CommitRecord | None:
        """Return the origin's newest version with this content; see `OriginNumbers`."""
        try:
            async with asyncio.timeout(_FIND_S):
                versions = await self._versions()
        except (WeightSyncError, TimeoutError) as error:
            logger.warning("%s is not asked about content %s: %s", self.url, content_digest, error)
            return None
        same = (v for v in reversed(versions) if v.content_digest == content_digest)
        return next(same, None)

    def plan(
        self, versions: Sequence[CommitRecord], wanted: CommitRecord | None = None
    ) -> list[Fetch]:
        """Return what is to be fetched of an origin that has these versions, by number."""
        highest = self._model.table.highest
        return fetch_plan(versions, highest, self._holds, self._holds_alike, self._trusts, wanted)

    def kept_bytes(self, fetch: Fetch) -> int:
        """Return how much of a fetch that was cut short lies on this host's disk."""
        for one in self._pushes.status():
            state = self._pushes.find(one.push_id).state
            if state.request.idempotency_key == push_key(fetch):
                return sum(shard.size for shard in (state.suspended or {}).values())
        return 0

    async def _run(self) -> None:
        wait_s = _AGAIN_S
        while True:
            # What is wanted, or found, from now on is not in what is looked at now.
            self._asked.clear()
            self._damaged.clear()
            try:
                await self._catch_up()
                self._complaint, wait_s = "", _AGAIN_S
                await _first(self._origin.changed(), self._damaged.wait(), self._asked.wait())
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                self._complain(error)
                wait_s = await self._back_off(wait_s)

    async def _back_off(self, wait_s: float) -> float:
        """Return how long to wait the next time, after that wait or once somebody asks."""
        await _first(asyncio.sleep(wait_s), self._asked.wait())
        return _AGAIN_S if self._asked.is_set() else min(2 * wait_s, _MOST_S)

    def _on_damage(self, record: VersionRecord) -> None:
        if record.version == self._model.table.newest:
            self._damaged.set()

    def _complain(self, error: Exception) -> None:
        """Count a failure, and log it unless it is the last one again."""
        refusal = to_refusal(error, f"following {self._origin.url}")
        if refusal is not error:
            logger.error("following %s", self._origin.url, exc_info=error)
        elif refusal.message != self._complaint:
            logger.warning("%s is not followed for now: %s", self._origin.url, refusal.message)
        self._complaint = refusal.message
        self._metrics.count_failure()

    async def _catch_up(self) -> None:
        """Return when the newest version of the origin is here and staged.

        Raises:
            WeightSyncError: Why it is not yet.
        """
        try:
            versions = await self._versions()
        except Exception:
            self._metrics.set_up(up=False)
            # What is kept here is served all the same.
            await self._newest.stage(())
            raise
        self._metrics.set_up(up=True)
        self._lag(versions)
        failure = await self._bring_wanted(versions)
        fetches = self.plan(versions)
        if not fetches:
            await self._drop_others("")
        for fetch in fetches:
            await self._fetch(fetch, push_key(fetch))
            self._lag(versions)
        self._check_same(versions)
        if not self._wanted:
            # Else it would take its slot from what is wanted, before that is used.
            await self._newest.stage(versions)
        if failure is not None:
            raise failure

    async def _bring_wanted(self, versions: Sequence[CommitRecord]) -> WeightSyncError | None:
        """Bring what is wanted, as far as the origin has it; return why something is wrong in it.

        Raises:
            WeightSyncError: Why it cannot come now: what has come of it is not given up for others.
        """
        failure = None
        for wanted in tuple(self._wanted):
            version = wanted.among(versions)
            if version is None or self._conflict(version) is not None:
                # Who waits for it is told by `lacking`.
                continue
            try:
                for fetch in self.plan(versions, version):
                    await self._fetch(fetch, push_key(fetch), backfill=True)
            except WeightSyncError as error:
                if error.reason in _PASSING:
                    raise
                failure = error
        return failure

    async def _versions(self) -> Sequence[CommitRecord]:
        # What another follower alone has is nobody else's.
        return [v for v in await self._origin.versions() if v.version < FIRST_LOCAL]

    def _lag(self, versions: Sequence[CommitRecord]) -> None:
        highest = self._model.table.highest
        self._metrics.set_lag(sum(version.version > highest for version in versions))

    def _holds(self, version: CommitRecord) -> bool:
        record = self._model.table.find(version.version)
        commit = record.commit if record is not None else None
        return commit is not None and commit.content_digest == version.content_digest

    def _holds_alike(self, version: CommitRecord) -> bool:
        record = self._model.table.find(version.version)
        commit = record.commit if record is not None else None
        return commit is not None and commit.manifest_digest == version.manifest_digest

    def _knows(self, version: CommitRecord) -> bool:
        record = self._model.table.find(version.version)
        return record is not None and record.commit is not None

    def _trusts(self, version: CommitRecord) -> bool:
        return version.content_digest not in self._distrusted

    def _check_same(self, versions: Sequence[CommitRecord]) -> None:
        """Raise if the newest number means other content here; tell of others once.

        Raises:
            WeightSyncError: VERSION_CONFLICT; also if the origin was begun anew, below this.
        """
        self._check_begun_anew(versions)
        for version in versions:
            if (conflict := self._conflict(version)) is None:
                continue
            if version is versions[-1]:
                raise conflict
            self._tell_once(conflict.message)

    def _conflict(self, version: CommitRecord) -> WeightSyncError | None:
        """Return the refusal of a number that means other content here; None: it does not."""
        if not self._knows(version) or self._holds(version):
            return None
        content = self._model.table.get(version.version).content_digest
        return WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {version.version} has content {content} here and "
            f"{version.content_digest} in {self._origin.url}; {_WAYS_ON}",
        )

    def _check_begun_anew(self, versions: Sequence[CommitRecord]) -> None:
        """Raise if the origin gives numbers anew that are lower than those that were used here.

        That none of its versions is here proves nothing: the newest of them may have been deleted
        there, or here. That one was committed after a higher number had come from there does.
        """
        table = self._model.table
        below = bool(versions) and versions[-1].version <= table.highest
        if not below or any(map(self._knows, versions)):
            return
        what = (
            f"{self.url} has versions up to {versions[-1].version}, none of which is here, where "
            f"numbers up to {table.highest} were used"
        )
        ours = table.find(table.newest)
        commit = ours.commit if ours is not None else None
        if commit and any(one.commit_time_ns > commit.commit_time_ns for one in versions):
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"{what}, and some were committed since: it was begun anew; {_WAYS_ON}",
            )
        self._tell_once(f"{what}: nothing is fetched until there is one above {table.highest}")

    def _tell_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", what)

    async def _fetch_again(self, version: CommitRecord) -> None:
        """Bring a version that exists here into memory.

        Raises:
            WeightSyncError: It cannot be had.
        """
        fetch = Fetch(version, delta=False)
        # Of its own, or it would be answered with what was committed.
        await self._fetch(fetch, f"{push_key(fetch)}-{self._fetched_again}")
        self._fetched_again += 1

    async def _fetch(self, fetch: Fetch, key: str, *, backfill: bool = False) -> None:
        """Make one version exist here, unless an engine's checkpoint becomes it meanwhile.

        Args:
            fetch: Which, and how.
            key: Finds what has come of it already.
            backfill: Its number may lie below others that were used here.

        Raises:
            WeightSyncError: It does not; what is wrong in it has left nothing behind.
        """
        version, push = fetch.version, None
        request = begin_request(fetch, key)
        await self._drop_others(key)
        await failpoints.reach("follow.fetch")
        await self._model.epochs.follow(version.epoch)
        if await self._is_adopted(version.version):
            return
        try:
            push = await self._pushes.open(request, None, backfill=backfill)
            if push.state.committed is None:
                await self._origin.bring(push, fetch)
            commit = pb.CommitPushRequest(content_digest=version.content_digest)
            await self._pushes.commit_push(push, commit)
        except WeightSyncError as error:
            await self._give_up(push, fetch, error)
            raise
        self._distrusted.discard(version.content_digest)
        self._metrics.count_fetch(delta=fetch.delta)
        form = "as a delta" if fetch.delta else "in full"
        logger.info("version %d came from %s, %s", version.version, self._origin.url, form)

    async def _is_adopted(self, version: int) -> bool:
        """Tell whether an engine's checkpoint turns out to be the version, once that is known."""
        record = self._model.table.find(version)
        if record is None or record.commit is not None or record.push_id:
            return False
        return await self._model.table.settled(version, _ADOPT_S) is not None

    async def _give_up(self, push: Push | None, fetch: Fetch, error: WeightSyncError) -> None:
        """Leave nothing of a version that came wrong; what came right of it may go on."""
        if error.reason in _PASSING and (push is None or push.state.error is None):
            return
        if push is not None:
            push.lifecycle.fail(error)
            await push.lifecycle.closed()
        # Once in full, then as a delta again.
        content = fetch.version.content_digest
        (self._distrusted.add if fetch.delta else self._distrusted.discard)(content)

    async def _drop_others(self, key: str) -> None:
        """Drop what was begun of versions that are not wanted any more, or in another form."""
        for one in self._pushes.status():
            push = self._pushes.find(one.push_id)
            if push.state.request.idempotency_key != key:
                await self._pushes.abort(pb.AbortPushRequest(push_id=one.push_id))


async def _first(*works: Coroutine[Any, Any, object]) -> None:
    """Return when one of these has ended, the others called off.

    Raises:
        Exception: What one of them raised.
    """
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
