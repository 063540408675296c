"""The loop of a follower: what is newest in the origin, or wanted, is fetched and kept here."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync import clock, failpoints
from weightsync.backoff import backoff_s
from weightsync.errors import Reason, WeightSyncError
from weightsync.log_lines import event
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_server.catalog.record import FIRST_LOCAL, VersionRecord
from weightsync_server.catalog.version_events import VersionDamaged
from weightsync_server.ops import traces
from weightsync_server.ops.os_errors import to_refusal
from weightsync_server.ops.tasks import cancel_tasks
from weightsync_server.replicate.fetch_plan import (
    Fetch,
    NewestStaging,
    begin_request,
    fetch_plan,
    push_key,
)
from weightsync_server.replicate.version_source import Origin
from weightsync_server.store.objects.piece_digests import CacheOutcome
from weightsync_server.store.store_records import CommitRecord

if TYPE_CHECKING:
    from weightsync_server.model import Model
    from weightsync_server.ops.metrics import Metrics
    from weightsync_server.push import PushService
    from weightsync_server.push.parts import Push


logger = logging.getLogger(__name__)


class WantedVersion(NamedTuple):
    """A version that is to come from the origin.

    If the hexadecimal `content_digest` is empty, whatever the origin has under that number.
    """

    version: int
    content_digest: str = ""

    def among(self, versions: Sequence[CommitRecord]) -> CommitRecord | None:
        """Return it of those of an origin, by number, or the newest other one with its content."""
        numbered = [one for one in versions if one.version == self.version]
        if not self.content_digest:
            return next(iter(numbered), None)
        same = [one for one in versions if one.content_digest == self.content_digest]
        return next((one for one in numbered if one in same), same[-1] if same else None)

    def refusal(self, versions: Sequence[CommitRecord], url: str) -> WeightSyncError:
        """Return why it cannot come from an origin that has these versions."""
        newest = versions[-1].version if versions else 0
        numbered = [one for one in versions if one.version == self.version]
        if numbered:
            lacks = (
                f"version {self.version} has content {numbered[0].content_digest} in {url}, but "
                f"{self.content_digest} is wanted"
            )
        else:
            lacks = f"version {self.version} is neither on this host nor in {url}"
        known = f"the newest there is {newest}" if newest else "there is none yet"
        again = "its content there again" if self.content_digest else "it there first"
        return WeightSyncError(
            Reason.VERSION_UNKNOWN,
            f"{lacks}: {known}; push {again}, or apply one that is there",
            metadata={"newest_version": str(newest)},
        )


#: From a failure to the next try, seconds: doubled each time.
_AGAIN_S, _MOST_S = 0.5, 30.0
#: Longest wait for the origin's answer about one content, seconds.
_FIND_S = 10.0
#: Longest wait for an engine's checkpoint that is becoming the version to fetch, seconds.
_ADOPT_S = 60.0
#: What is to be done where numbers mean other content here than in the origin.
_WAYS_ON = (
    "push a higher version there; or, if the versions here are not needed, give this follower an "
    "empty --state-dir"
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

    `origin` is closed with this. `pushes` receives, proves and commits each version, as it does
    what a trainer pushes.
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
        self._wanted: list[WantedVersion] = []
        self._asked = asyncio.Event()
        model.events.on(VersionDamaged, lambda event: self._on_damage(event.record))
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name="follow")

    async def stop(self) -> None:
        """What has come of a version stays and goes on after a restart."""
        await cancel_tasks(self._task)
        await self._origin.close()

    @contextlib.contextmanager
    def wanting(self, version: int, content_digest: str = "") -> Iterator[None]:
        """Fetch a version before the newest, at once, also after a failure, until the block ends.

        Of several that are wanted, one after the other.
        """
        wanted = WantedVersion(version, content_digest)
        self._wanted.append(wanted)
        self._asked.set()
        try:
            yield
        finally:
            self._wanted.remove(wanted)

    async def lacking(self, version: int, content_digest: str = "") -> WeightSyncError | None:
        """Return why a version will not come; None: it may, also if the origin cannot be asked."""
        wanted = WantedVersion(version, content_digest)
        end = clock.monotonic() + self._origin.patience_s
        while True:
            try:
                async with asyncio.timeout(_FIND_S):
                    versions = await self.versions()
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
                versions = await self.versions()
        except (WeightSyncError, TimeoutError) as error:
            logger.warning("could not ask %s about content %s: %s", self.url, content_digest, error)
            return None
        same = (v for v in reversed(versions) if v.content_digest == content_digest)
        return next(same, None)

    def plan(
        self, versions: Sequence[CommitRecord], wanted: CommitRecord | None = None
    ) -> list[Fetch]:
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
        failures = 0
        while True:
            # What is wanted, or found, from now on is not in what is looked at now.
            self._asked.clear()
            self._damaged.clear()
            try:
                await self._catch_up()
                self._complaint, failures = "", 0
                await _first(self._origin.changed(), self._damaged.wait(), self._asked.wait())
            except Exception as error:  # noqa: BLE001 - whatever it was, it is tried again
                self._complain(error)
                failures += 1
                wait_s = backoff_s(failures, _AGAIN_S, _MOST_S)
                await _first(asyncio.sleep(wait_s), self._asked.wait())
                if self._asked.is_set():
                    failures = 0

    def _on_damage(self, record: VersionRecord) -> None:
        if record.version == self._model.table.newest:
            self._damaged.set()

    def _complain(self, error: Exception) -> None:
        """Count a failure, and log it unless it is the last one again."""
        refusal = to_refusal(error, f"following {self._origin.url}")
        if refusal is not error:
            logger.error(
                "a fault while %s was followed; it is tried again", self._origin.url, exc_info=error
            )
        elif refusal.message != self._complaint:
            logger.warning(
                "no version can be fetched from %s for now: %s", self._origin.url, refusal.message
            )
        self._complaint = refusal.message
        self._metrics.failures.inc()

    async def _catch_up(self) -> None:
        """Return when the newest version of the origin is here and staged."""
        try:
            versions = await self.versions()
        except Exception:
            self._metrics.up.set(0)
            # What is kept here is served all the same.
            await self._newest.stage(())
            raise
        self._metrics.up.set(1)
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

        If this raises, it cannot come now: what has come of it is not given up for others.
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

    async def versions(self) -> Sequence[CommitRecord]:
        """Return what the origin has that is meant for others."""
        # What another follower alone has is nobody else's.
        return [v for v in await self._origin.versions() if v.version < FIRST_LOCAL]

    def _lag(self, versions: Sequence[CommitRecord]) -> None:
        highest = self._model.table.highest
        self._metrics.lag.set(sum(version.version > highest for version in versions))

    def _holds(self, version: CommitRecord) -> bool:
        here = self._model.table.committed(version.version)
        return here is not None and here.content_digest == version.content_digest

    def _holds_alike(self, version: CommitRecord) -> bool:
        record = self._model.table.find(version.version)
        commit = record.commit if record is not None else None
        return commit is not None and commit.manifest_digest == version.manifest_digest

    def _trusts(self, version: CommitRecord) -> bool:
        return version.content_digest not in self._distrusted

    def _check_same(self, versions: Sequence[CommitRecord]) -> None:
        """Raise VERSION_CONFLICT if the newest number means other content here.

        Also if the origin was begun anew, below this. Others are told of once.
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
        here = self._model.table.committed(version.version)
        if here is None or self._holds(version):
            return None
        return WeightSyncError(
            Reason.VERSION_CONFLICT,
            f"version {version.version} has content {here.content_digest} here and "
            f"{version.content_digest} in {self._origin.url}; {_WAYS_ON}",
        )

    def _check_begun_anew(self, versions: Sequence[CommitRecord]) -> None:
        """Raise if the origin gives numbers anew that are lower than those that were used here.

        That none of its versions is here proves nothing: the newest of them may have been deleted
        there, or here. That one was committed after a higher number had come from there does.
        """
        table = self._model.table
        below = bool(versions) and versions[-1].version <= table.highest
        if not below or any(table.committed(v.version) for v in versions):
            return
        what = (
            f"{self.url} has versions up to {versions[-1].version}, none of which are here, but "
            f"numbers up to {table.highest} were used here"
        )
        ours = table.find(table.newest)
        commit = ours.commit if ours is not None else None
        if commit and any(one.commit_time_ns > commit.commit_time_ns for one in versions):
            raise WeightSyncError(
                Reason.VERSION_CONFLICT,
                f"{what}, and versions were committed since: it was started over; {_WAYS_ON}",
            )
        self._tell_once(f"{what}: nothing is fetched until a version above {table.highest} exists")

    def _tell_once(self, what: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            logger.warning("%s", what)

    async def _fetch_again(self, version: CommitRecord) -> None:
        """Bring a version that exists here into memory."""
        fetch = Fetch(version, delta=False)
        # Of its own, or it would be answered with what was committed.
        await self._fetch(fetch, f"{push_key(fetch)}-{self._fetched_again}")
        self._fetched_again += 1

    async def _fetch(self, fetch: Fetch, key: str, *, backfill: bool = False) -> None:
        """Make one version exist here, unless an engine's checkpoint becomes it meanwhile.

        `key` finds what has come of it already. With `backfill`, its number may lie below others
        that were used here. What is wrong in a version has left nothing behind.
        """
        version, push = fetch.version, None
        request = begin_request(fetch, key)
        await self._drop_others(key)
        await failpoints.reach("follow.fetch")
        await self._model.epochs.follow(version.epoch)
        if await self._is_adopted(version.version):
            return
        # What comes here is a part of the way of that version.
        traces.take_over(version.traceparent)
        try:
            push = await self._pushes.open(request, None, backfill=backfill)
            if push.state.committed is None:
                await self._origin.bring(push, fetch)
            probes = await self._origin.probes(version)
            commit = pb.CommitPushRequest(content_digest=version.content_digest)
            if probes is not None:
                commit.probes.CopyFrom(probes)
            await self._pushes.commit_push(push, commit)
        except WeightSyncError as error:
            await self._give_up(push, fetch, error)
            raise
        self._distrusted.discard(version.content_digest)
        self._metrics.fetches["delta" if fetch.delta else "full"].inc()
        form = "as a delta" if fetch.delta else "in full"
        logger.info(
            "version %d was fetched from %s, %s",
            version.version,
            self._origin.url,
            form,
            extra=event("follow.fetched", version=version.version),
        )

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
    """Return when one of these has ended or raised, the others called off."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        await cancel_tasks(*tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()


#: What may come of a piece that a cache is asked for.
_PIECES = ("right", "wrong", "missing")


class FollowMetrics:
    """Counts for one follower; a server that follows none has none of them."""

    def __init__(self, metrics: Metrics) -> None:
        self.up = metrics.gauge(
            "weightsync_follow_origin_up", "1 while the origin of a follower answers."
        )
        self.lag = metrics.gauge(
            "weightsync_follow_lag_versions",
            "Versions of the origin above the newest one that this follower has.",
        )
        self.failures = metrics.counter(
            "weightsync_follow_failures_total",
            "Tries of a follower to have the newest version that failed.",
        )
        self.fetches = metrics.counters(
            "weightsync_follow_fetched_total",
            "Versions that a follower has fetched, by form.",
            "form",
            ("full", "delta"),
        )
        self._pieces = metrics.counters(
            "weightsync_follow_cache_pieces_total",
            "Pieces of shards that a follower asked its cache for: right, wrong, or missing there.",
            "outcome",
            _PIECES,
        )

    def count_pieces(self, outcome: CacheOutcome) -> None:
        """Count what a cache had of one shard."""
        for name in _PIECES:
            self._pieces[name].inc(getattr(outcome, name))
