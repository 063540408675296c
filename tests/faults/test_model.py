"""The real model, ingest and apply against a model of a dozen lines, step by step.

Whatever the order of pushes, applies, rollbacks, deletions, pins, epochs and crashes: the service
is what the model says.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.unit.server.engine.plant import Engine, Plant, hurry, plant, shards, tensors, until
from tests.unit.server.world import MODEL, content, one_stream
from weightsync.errors import Reason, WeightSyncError
from weightsync_server.catalog.garbage_collector import Retention

if TYPE_CHECKING:
    from collections.abc import Coroutine

pytestmark = pytest.mark.timeout(180)

_SEEDS = st.integers(2, 250)


@pytest.fixture(scope="module", autouse=True)
def fast() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        yield


class Service(RuleBasedStateMachine):
    """Runs on a loop of its own; the engine outlives the server."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="wsm"))
        self.engine = Engine(self.folder / "segments.sock")
        # The model: what must be true.
        self.committed: dict[int, int] = {}
        self.pinned: set[int] = set()
        self.rejected: set[int] = set()
        self.lived: list[int] = []
        self.previous = 0
        self.keys = 0
        self.highest = 0
        self.epoch = 0

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return the answer, or the reason of the refusal."""
        try:
            return self.loop.run_until_complete(asyncio.wait_for(work, 20))
        except WeightSyncError as error:
            return error.reason

    @property
    def live(self) -> int:
        """The version that is live."""
        return self.lived[-1]

    @property
    def back(self) -> int:
        """Where a rollback goes; 0: nowhere."""
        good = [
            version
            for version in self.lived
            if version != self.live and version in self.committed and version not in self.rejected
        ]
        return good[-1] if good else 0

    @initialize()
    def start(self) -> None:
        self._start()
        self.committed, self.lived, self.highest = {1: 1}, [1], 1

    def _start(self) -> None:
        self.stack = contextlib.AsyncExitStack()
        store = f"file://{self.folder / 'store'}"
        made = plant(self.folder, self.engine, store=store, retention=Retention(1000))
        self.it: Plant = self.do(self.stack.enter_async_context(made))
        self.do(self.it.ready())

    def teardown(self) -> None:
        with contextlib.suppress(AttributeError):
            self.do(self.stack.aclose())
        self.loop.close()
        shutil.rmtree(self.folder)

    # Writers

    @rule(seed=_SEEDS, gap=st.integers(1, 3))
    def push(self, seed: int, gap: int) -> None:
        version = self.highest + gap
        answer = self._push(seed, version, self.epoch)
        assert answer.commit.content_digest == content(shards(seed))
        self.committed[version], self.highest = seed, version

    def _push(self, seed: int, version: int, epoch: int) -> Any:
        stream = one_stream(shards(seed), version=version, epoch=epoch)
        return self.do(self.it.here.pushes.stream(stream))

    @rule(data=st.data())
    def push_again(self, data: st.DataObject) -> None:
        version = data.draw(st.sampled_from(sorted(self.committed)))
        assert self._push(self.committed[version], version, self.epoch).commit.already

    @rule(data=st.data(), seed=_SEEDS)
    def push_other_content(self, data: st.DataObject, seed: int) -> None:
        version = data.draw(st.sampled_from(sorted(self.committed)))
        if self.committed[version] != seed:
            assert self._push(seed, version, self.epoch) is Reason.VERSION_CONFLICT

    @rule(lowest=st.booleans())
    def push_a_used_number(self, lowest: bool) -> None:
        gone = sorted(set(range(1, self.highest + 1)) - set(self.committed))
        if gone:
            version = gone[0 if lowest else -1]
            assert self._push(5, version, self.epoch) is Reason.VERSION_NOT_ABOVE

    @rule()
    def acquire_epoch(self) -> None:
        self.epoch += 1
        assert self.do(self.it.here.model.epochs.acquire("model")) == self.epoch

    @precondition(lambda self: self.epoch > 1)
    @rule()
    def push_as_a_stale_writer(self) -> None:
        assert self._push(5, self.highest + 1, self.epoch - 1) is Reason.EPOCH_STALE

    # Controllers

    @rule(data=st.data(), again=st.booleans())
    def apply(self, data: st.DataObject, again: bool) -> None:
        version = data.draw(st.sampled_from(sorted(self.committed)))
        self.keys += 1
        key = f"key {self.keys}" if again else ""
        answer = self.do(self.it.apply(version, idempotency_key=key))
        if version in self.rejected:
            assert answer is Reason.VERSION_REJECTED
        elif version < self.live:
            assert answer is Reason.VERSION_BELOW_LIVE
        else:
            assert answer.version == version
            assert answer.ranks[0].content_digest == content(shards(self.committed[version]))
            self._lives(version)
            if again:
                assert self.do(self.it.apply(version, idempotency_key=key)) == answer

    @rule()
    def apply_the_newest(self) -> None:
        good = [v for v in self.committed if v not in self.rejected and v > self.live]
        version = max(good, default=self.live)
        assert self.do(self.it.apply()).version == version
        self._lives(version)

    @rule()
    def roll_back(self) -> None:
        left, back = self.live, self.back
        answer = self.do(self.it.rollback())
        if not back:
            assert answer is Reason.NO_ROLLBACK
            return
        assert (answer.report.version, answer.rejected_version) == (back, left)
        self.rejected.add(left)
        self._lives(back)

    def _lives(self, version: int) -> None:
        if version == self.live:
            return
        self.previous = self.live
        if version in self.lived:
            # Gone back: what came after it is no way back any more.
            del self.lived[self.lived.index(version) :]
        self.lived.append(version)

    @rule(data=st.data(), force=st.booleans())
    def delete(self, data: st.DataObject, force: bool) -> None:
        version = data.draw(st.sampled_from(sorted(self.committed)))
        kept = version == self.back and not force
        answer = self.do(self.it.here.model.collector.delete(version, force=force))
        if version == self.live or version in self.pinned or kept:
            assert answer is Reason.VERSION_IN_USE
        else:
            assert answer is None
            del self.committed[version]
            self.rejected.discard(version)

    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        # One at a time: pinned versions keep their slots, and the others wait for one.
        version = data.draw(st.sampled_from(sorted(self.committed)))
        for other in self.pinned - {version}:
            self.do(self.it.here.model.serving.pin(other, pinned=False))
        self.do(self.it.here.model.serving.pin(version, pinned=True))
        self.pinned = {version}

    # Faults

    @rule()
    def restart_the_server(self) -> None:
        self.do(self.stack.aclose())
        self._start()
        # The journal remembers one way back.
        self.lived = [v for v in (self.previous, self.live) if v in self.committed]

    @rule()
    def restart_the_engine(self) -> None:
        self.engine.restart(tensors(1))
        started = self.do(self.engine.health()).engine_id
        # What it does in between may be over before anybody looks.
        self.do(until(lambda: self.it.keeper.status().engine_id == started))
        self.do(self.it.ready())

    @rule()
    def an_apply_writes_wrong_bytes(self) -> None:
        good = [v for v in self.committed if v not in self.rejected and v > self.live]
        if good:
            version = max(good)
            self.engine.wrong = [b"\x00" * 256]
            assert self.do(self.it.apply(version)) is Reason.APPLY_RESTORED
            self.rejected.add(version)

    # What must be true after every step

    @invariant()
    def the_service_is_the_model(self) -> None:
        model = self.it.here.model
        told = {r.version: r for r in model.table.list()}
        assert {v: r.content_digest for v, r in told.items()} == {
            version: content(shards(seed)) for version, seed in self.committed.items()
        }
        assert {v for v, r in told.items() if r.pinned} == self.pinned & set(told)
        assert {v for v, r in told.items() if r.rejected_reason} == self.rejected
        assert model.serving.live == self.live
        assert model.epochs.newest == self.epoch
        assert self.engine.serves == self.committed[self.live]

    @invariant()
    def nothing_is_left_behind(self) -> None:
        here = self.it.here
        assert not here.pushes.status()
        stored = {p.name for p in (self.folder / "store" / MODEL).iterdir() if p.is_dir()}
        assert stored == {f"v{version}" for version in self.committed}
        # Memory is given back in threads.
        self.do(here.model.segments.unmapped())
        held = sum(slot.reserved_bytes for slot in here.model.slots.slots)
        assert here.budget.reserved == held + here.model.segments.retired_bytes


Service.TestCase.settings = settings(
    max_examples=25,
    stateful_step_count=50,
    # To shrink a failure takes minutes; its seed is printed.
    phases=[Phase.generate],
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)
TestService = Service.TestCase
