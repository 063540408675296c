"""Every order of steps of writers that acquire, commit and die: nothing that counted is undone.

The fence itself runs, on a store in this process whose requests happen one at a time, in every
order that makes a difference. A writer acquires an epoch, is acknowledged, and commits; any of them
may die before any request. Asked of each end, by a reader that comes last and by one that came at
the time:

- what was acknowledged as committed counts for ever,
- what counted once for a reader counts for ever,
- once an epoch is acknowledged, no commit of an older one that begins to count is missing from what
  its writer saw.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

import pytest

from weightsync.errors import WeightSyncError
from weightsync_server.store.objects.object_client import ObjectClient, ObjectFacts
from weightsync_server.store.objects.object_fences import Floor, ObjectFence
from weightsync_server.store.objects.object_keys import RecordName
from weightsync_server.store.store_records import encode_document

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator, Sequence

_T = TypeVar("_T")
_FACTS = ObjectFacts(0, datetime(2026, 1, 1, tzinfo=UTC))


class _Turn:
    """Where a step waits for its turn."""

    def __await__(self) -> Generator[None, None, None]:
        yield


@dataclass
class _Bucket:
    """Linearisable: each request happens at once, when its turn comes.

    Attributes:
        objects: What is there.
        actor: Whose turn it is.
        answers: What each actor was answered, which is all that its next steps depend on.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    actor: int = -1
    answers: dict[int, tuple[object, ...]] = field(default_factory=dict)

    async def get(self, key: str) -> bytes | None:
        await _Turn()
        return self._answer(self.objects.get(key))

    async def create(self, key: str, data: bytes) -> bytes:
        await _Turn()
        return self._answer(self.objects.setdefault(key, data))

    async def list_under(self, prefix: str) -> dict[str, ObjectFacts]:
        await _Turn()
        found = tuple(sorted(key for key in self.objects if key.startswith(f"{prefix}/")))
        return dict.fromkeys(self._answer(found), _FACTS)

    def _answer(self, answer: _T) -> _T:
        self.answers[self.actor] = (*self.answers.get(self.actor, ()), answer)
        return answer


@dataclass
class _World:
    """One run.

    Attributes:
        bucket: The store.
        committed: Records whose writer was told that they count.
        seen: Records that counted for a reader.
        floors: What counted of older epochs when an epoch was acknowledged.
    """

    bucket: _Bucket = field(default_factory=_Bucket)
    committed: list[RecordName] = field(default_factory=list)
    seen: set[RecordName] = field(default_factory=set)
    floors: dict[int, set[RecordName]] = field(default_factory=dict)

    def fence(self, server: str) -> ObjectFence:
        return ObjectFence(cast("ObjectClient", self.bucket), "m", server)

    async def acquire(self, server: str, epoch: int) -> None:
        fence = self.fence(server)
        await fence.acquire(epoch)
        names = await fence.records()
        floor = await fence.floor()
        self.floors[epoch] = {n for n in names if n.epoch < epoch and floor.counts(n)}

    async def commit(self, server: str, name: RecordName) -> None:
        fence = self.fence(server)
        await fence.claim(name.epoch)
        if (await fence.floor()).epoch > name.epoch:
            return
        body = encode_document({"by": server})
        if await self.bucket.create(f"m/versions/{name.path}", body) != body:
            return
        if (await fence.floor()).counts(name):
            self.committed.append(name)

    async def read(self) -> None:
        fence = self.fence("reader")
        names = await fence.records()
        floor = await fence.floor()
        self.seen |= {name for name in names if floor.counts(name)}

    @property
    def state(self) -> object:
        """What the rest of the run depends on."""
        answers = tuple(sorted(self.bucket.answers.items()))
        return tuple(sorted(self.bucket.objects.items())), answers

    def check(self) -> None:
        last = self.fence("last")
        names = _run(last.records())
        floor: Floor = _run(last.floor())
        counting = {name for name in names if floor.counts(name)}
        assert set(self.committed) <= counting
        assert self.seen <= counting
        for epoch, seen in self.floors.items():
            assert {name for name in counting if name.epoch < epoch} == seen


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    """Run to the end, with nobody between two steps."""
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            return end.value


def _orders(make: Any, deaths: int) -> int:
    """Reach every state that some actors can, `deaths` of which may stop for ever; count the ends.

    Two orders that leave the bucket alike, and told every actor the same, go on alike.
    """
    count = 0
    reached = set()
    # Choices made so far; each is the number of an actor, or its complement: that actor dies.
    pending: list[tuple[int, ...]] = [()]
    while pending:
        choices = pending.pop()
        world, actors = make()
        alive = dict(enumerate(actors))
        for actor in list(alive):
            _step(world, alive, actor)
        for choice in choices:
            if choice < 0:
                alive.pop(~choice).close()
            else:
                _step(world, alive, choice)
        died = sum(choice < 0 for choice in choices)
        state = (world.state, tuple(alive), died)
        if state in reached:
            pass
        elif alive:
            pending += [(*choices, actor) for actor in alive]
            if died < deaths:
                pending += [(*choices, ~actor) for actor in alive]
        else:
            world.check()
            count += 1
        reached.add(state)
        for work in alive.values():
            work.close()
    return count


def _step(world: Any, alive: dict[int, Coroutine[Any, Any, None]], actor: int) -> None:
    world.bucket.actor = actor
    try:
        alive[actor].send(None)
    except (StopIteration, WeightSyncError):
        del alive[actor]


def _begun() -> _World:
    world = _World()
    _run(world.acquire("old", 1))
    return world


def _one_commit_one_takeover() -> tuple[_World, Sequence[Coroutine[Any, Any, None]]]:
    world = _begun()
    return world, [world.commit("old", RecordName(7, 1)), world.acquire("new", 2)]


def _a_late_lower_number() -> tuple[_World, Sequence[Coroutine[Any, Any, None]]]:
    world = _begun()
    _run(world.commit("old", RecordName(9, 1)))
    return world, [world.commit("old", RecordName(8, 1)), world.acquire("new", 2)]


def _a_reader_meanwhile() -> tuple[_World, Sequence[Coroutine[Any, Any, None]]]:
    world = _begun()
    return world, [
        world.commit("old", RecordName(7, 1)),
        world.acquire("new", 2),
        world.read(),
    ]


def _two_takeovers() -> tuple[_World, Sequence[Coroutine[Any, Any, None]]]:
    world = _begun()
    _run(world.commit("old", RecordName(6, 1)))
    return world, [world.acquire("new", 2), world.acquire("newer", 3)]


@pytest.mark.parametrize(
    ("make", "deaths"),
    [
        (_one_commit_one_takeover, 1),
        (_a_late_lower_number, 1),
        (_a_reader_meanwhile, 1),
        (_two_takeovers, 1),
    ],
)
def test_in_every_order_what_counted_counts(make: Any, deaths: int) -> None:
    assert _orders(make, deaths) > 30


def test_the_checks_find_a_floor_that_is_not_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Floor, "counts", lambda _floor, _name: True)
    with pytest.raises(AssertionError):
        _orders(_one_commit_one_takeover, 0)
