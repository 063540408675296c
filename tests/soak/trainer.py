"""The trainer: pushes over a bad link, cuts, resumes, repeats, races and comes back too late."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from typing import TYPE_CHECKING, ClassVar

import grpc

from tests.soak.callers import FIRST, MODEL, TIMEOUT_S, Caller
from tests.soak.half import half_a_push
from tests.soak.history import NO_ANSWER
from tests.soak.pushing import CHUNK, Push, delta_push, signature
from tests.support.proxy import FaultProxy, Faults
from tests.support.stock import push_messages
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from tests.soak.contents import Contents
    from tests.soak.history import History
    from tests.soak.site import Site

__all__ = ["Trainer"]

#: A stream on which nothing comes any more is noticed within this time, seconds.
_NOTICED_S = 10.0
#: What the system refuses before anybody looks at the epoch.
_SYSTEM = (Reason.DISK_EXHAUSTED, Reason.MEMORY_EXHAUSTED)
_FINAL = (Reason.EPOCH_STALE, Reason.VERSION_NOT_ABOVE, Reason.VERSION_CONFLICT)


class Trainer(Caller):
    """Pushes. Each act is one fault of a trainer or of its link, or none.

    Attributes:
        deltas: Versions that were committed as a delta, at the first attempt.
        handed_over: Versions that it wrote into the server's memory.
        ingested: Versions that went through an ingest process at the first attempt.
        half: A push of which the first shard is durable and the rest is not sent.
        link: What lies between it and the server.
    """

    acts: ClassVar[Mapping[str, int]] = {
        "push": 25, "ingest": 10, "hand": 10, "delta": 25, "race": 8, "stale": 8, "acquire": 9,
        "muddle": 3, "flip": 2, "cut": 3, "unheard": 2,
    }  # fmt: skip

    def __init__(self, site: Site, contents: Contents, history: History, seed: int) -> None:
        self.link = FaultProxy(site.server.address)
        super().__init__(site, contents, history, seed, self.link.address)
        self.deltas = self.handed_over = self.ingested = 0
        self._ingest = grpc.insecure_channel(
            site.ingest_address, options=(("grpc.max_reconnect_backoff_ms", 200),)
        )
        self._streams_to = self.stub
        self.half: Push | None = None

    def close(self) -> None:
        """Close the connection and the link."""
        super().close()
        self._ingest.close()
        self.link.close()

    def rest(self) -> None:
        """Some hundred versions in a run: each is read back at its end."""
        time.sleep(self.rng.uniform(0, 0.3))

    # Pushes

    def push(self, number: int | None = None) -> int:
        """Push a new version, in several attempts if need be; return its number.

        Args:
            number: Its content; None: any, and perhaps in two parts.
        """
        push = self._new(number)
        messages = push.messages(self.history.epoch)
        if number is None and self.rng.random() < 0.2:
            # Never the commit: the rest comes on another stream.
            del messages[self.rng.randint(1, len(messages) - 1) :]
        self._see_through(push, *self._once(push, messages))
        return push.version

    def ingest(self) -> None:
        """Push through an ingest process."""
        self._streams_to = weightsync_pb2_grpc.WeightSyncStub(self._ingest)
        before = len(self.history.committed)
        try:
            self.push()
        finally:
            self._streams_to = self.stub
        self.ingested += len(self.history.committed) > before

    def hand(self) -> None:
        """Write a version into the memory of the server, as a trainer on its host does."""
        push = self._new()
        begun, outcome = self.call(
            "begin",
            lambda: self.stub.BeginPush(
                push.begin(self.history.epoch, here=True), timeout=TIMEOUT_S
            ),
            version=push.version,
        )
        commit = None
        if begun is not None and begun.HasField("same_host_offer"):
            commit, outcome = self.call(
                "hand over", lambda: push.hand_over(self.stub, begun), version=push.version
            )
            self.handed_over += commit is not None
        self._see_through(push, commit, NO_ANSWER if begun is not None else outcome)

    def delta(self) -> None:
        """Push what changed since a version that is there; with none, push in full."""
        committed, _ = self.history.snapshot()
        bases = [
            (version, self.contents.known[digest])
            for version, digest in committed.items()
            if version != FIRST and digest in self.contents.known
        ]
        if not bases:
            self.push()
            return
        # Chains of deltas become long enough to be folded.
        newest = self.wish == "delta" or self.rng.random() < 0.7
        _, base = max(bases) if newest else self.rng.choice(bases)
        version, number = self.history.next_version(), self.contents.sibling(base, self.rng)
        key = f"{version}-{self.rng.randrange(1 << 30)}"
        push = delta_push(version, key, self.contents, base, number)
        self.history.pushing(version, push.digest)
        messages = push.messages(self.history.epoch)
        if self.rng.random() < 0.2:
            del messages[self.rng.randint(1, len(messages) - 1) :]
        commit, outcome = self._once(push, messages)
        self._see_through(push, commit, outcome)
        self.deltas += commit is not None

    def race(self) -> None:
        """Let two trainers push one version with other contents: at most one is committed."""
        version = self.history.next_version()
        numbers = self.rng.sample(range(min(self.contents.count, 1 << 20)), 2)
        threads = [
            threading.Thread(target=self._one_of_two, args=(version, number)) for number in numbers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.done["race"] += 1

    def stale(self) -> None:
        """Push as a trainer that slept through the newest epoch."""
        epoch = self.history.epoch - 1
        if epoch < 1:
            self.acquire()
            return
        version, number = self.history.next_version(), self.rng.randrange(self.contents.count)
        self.contents.digest(number)
        messages = push_messages(self.contents.shards(number), version, epoch=epoch, model=MODEL)
        answer, outcome = self.call(
            "stale push", lambda: self.stub.PushWeights(messages, timeout=TIMEOUT_S), epoch=epoch
        )
        if answer is not None:
            self.history.violate(f"epoch {epoch} pushed version {version} as a stale writer")
        elif outcome not in (Reason.EPOCH_STALE, Reason.LIMIT_EXCEEDED, *_SYSTEM, NO_ANSWER):
            self.history.violate(f"a stale writer was refused with {outcome}")
        self.done["stale"] += outcome == Reason.EPOCH_STALE

    def acquire(self) -> None:
        """Become the writer."""
        request = pb.AcquireEpochRequest(model=MODEL, holder="soak")
        answer, _ = self.call("epoch", lambda: self.stub.AcquireEpoch(request, timeout=TIMEOUT_S))
        if answer is not None:
            self.history.acquired(answer.epoch)

    # Wrong bytes

    def muddle(self) -> None:
        """Send a chunk twice, two that overlap, a gap or two in the wrong order."""
        push = self._new()
        messages = push.messages(self.history.epoch)
        places = [i for i, m in enumerate(messages) if m.HasField("chunk") and m.chunk.offset]
        place, kind = self.rng.choice(places), self.rng.choice(("twice", "overlap", "gap", "order"))
        if kind == "twice":
            messages.insert(place, messages[place])
        elif kind == "overlap":
            again = pb.PushWeightsRequest()
            again.CopyFrom(messages[place - 1])
            again.chunk.offset += 1000
            again.chunk.data = again.chunk.data[1000:]
            messages.insert(place, again)
        elif kind == "gap":
            del messages[place - 1]
        else:
            messages[place - 1 : place + 1] = messages[place], messages[place - 1]
        refused = kind in ("gap", "order")
        answer, outcome = self._once(push, messages)
        if refused and answer is not None:
            self.history.violate(f"a push with a {kind} of chunks was accepted")
        if refused and outcome == Reason.OFFSET_MISMATCH:
            outcome = NO_ANSWER
            self.done["muddle"] += 1
        self.done["muddle"] += answer is not None
        self._see_through(push, answer, outcome)

    def flip(self) -> None:
        """Send one bit that is not as the trainer has it; no such version may come to be."""
        version, number = self.history.next_version(), self.rng.randrange(self.contents.count)
        shards = self.contents.shards(number)
        messages = list(push_messages(shards, version, chunk_bytes=CHUNK, model=MODEL))
        victim = self.rng.choice([m for m in messages if m.HasField("chunk")])
        data = bytearray(victim.chunk.data)
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        victim.chunk.data = bytes(data)
        answer, outcome = self.call(
            "flip", lambda: self.stub.PushWeights(iter(messages), timeout=TIMEOUT_S)
        )
        if answer is not None:
            self.history.violate(f"version {version} was committed with a bit that was flipped")
        self.done["flip"] += outcome in (
            Reason.DIGEST_MISMATCH, Reason.SHARD_INVALID, Reason.LAYOUT_INVALID,
        )  # fmt: skip

    # Bad links

    def cut(self) -> None:
        """Lose the link at some byte, or at the end of a chunk."""
        push = self._new()
        size = sum(len(data) for _, data in push.shards)
        place = self.rng.randrange(size)
        place = self.rng.choice((place, place // CHUNK * CHUNK))
        before = self.link.cuts
        self.link.faults = Faults(cut_after=self.link.passed + place + 1)
        answer, outcome = self._once(push, push.messages(self.history.epoch))
        self.link.faults = Faults()
        self.done["cut"] += self.link.cuts > before
        self._see_through(push, answer, outcome)

    def unheard(self) -> None:
        """Lose the answer to a commit, then ask again."""
        push = self._new()
        before = self.link.passed
        self.link.faults = Faults(lose_replies=True)
        try:
            messages = iter(push.messages(self.history.epoch))
            call = self.stub.PushWeights.future(messages, timeout=TIMEOUT_S)
            size = sum(len(data) for _, data in push.shards)
            end = time.monotonic() + 3
            while self.link.passed - before < size and time.monotonic() < end:
                time.sleep(0.01)
            time.sleep(0.3)
        finally:
            self.link.cut()
            self.link.faults = Faults()
        answer, outcome = self.call("unheard", call.result, version=push.version)
        self.done["unheard"] += outcome == NO_ANSWER
        commit = answer.commit if answer is not None and answer.HasField("commit") else None
        self._see_through(push, commit, outcome)

    def killed(self) -> None:
        """A trainer dies half-way; another goes on where it was."""
        self._broken(signal.SIGKILL)

    def frozen(self) -> None:
        """A trainer stops half-way, is noticed, and another goes on where it was."""
        self._broken(signal.SIGSTOP)

    def survive(self) -> None:
        """Leave a push half done, to go on with it when the server was started again."""
        if self.half is None:
            push = self._new()
            # Begin, all layouts, the chunks and digests of the first shard.
            first = len(push.shards) + 2 - (-len(push.shards[0][1]) // CHUNK)
            self._once(push, push.messages(self.history.epoch)[:first])
            if self._durable(push):
                self.half = push

    def revive(self) -> None:
        """Go on with the push that survived."""
        push, self.half = self.half, None
        if push is not None:
            self._see_through(push, None, NO_ANSWER)

    # Inside

    def _new(self, number: int | None = None) -> Push:
        version = self.history.next_version()
        number = self.rng.randrange(self.contents.count) if number is None else number
        digest = self.contents.digest(number)
        self.history.pushing(version, digest)
        key = f"{version}-{self.rng.randrange(1 << 30)}"
        shards = self.contents.shards(number)
        # As a trainer that pushes again does: ranks then read what comes.
        named = {"layout_digest": signature(shards)} if self.rng.random() < 0.5 else {}
        return Push(version, digest, shards, key, named)

    def _once(
        self, push: Push, messages: Iterable[pb.PushWeightsRequest]
    ) -> tuple[pb.CommitPushResponse | None, str]:
        answer, outcome = self.call(
            "push",
            lambda: self._streams_to.PushWeights(iter(messages), timeout=TIMEOUT_S),
            version=push.version,
        )
        if answer is not None and answer.HasField("commit"):
            return answer.commit, outcome
        return None, outcome

    def _see_through(self, push: Push, commit: pb.CommitPushResponse | None, outcome: str) -> None:
        for _ in range(4):
            if commit is not None or outcome not in ("ok", NO_ANSWER):
                break
            commit, outcome = self._resume(push)
        self._ended(push.version, push.digest, commit, outcome)
        if commit is not None and self.rng.random() < 0.3:
            self._repeat(push)

    def _resume(self, push: Push) -> tuple[pb.CommitPushResponse | None, str]:
        # What was open before a restart may have been taken for decided since.
        self.history.pushing(push.version, push.digest)
        request = push.begin(self.history.epoch)
        begun, outcome = self.call(
            "begin", lambda: self.stub.BeginPush(request, timeout=TIMEOUT_S), version=push.version
        )
        if begun is None:
            return None, outcome
        if begun.HasField("committed"):
            return begun.committed, "ok"
        sent, outcome = self.call(
            "resume",
            lambda: self.stub.PushWeights(push.rest(begun), timeout=TIMEOUT_S),
            version=push.version,
        )
        if sent is None:
            return None, outcome
        return self.call(
            "commit",
            lambda: self.stub.CommitPush(
                pb.CommitPushRequest(push_id=begun.push_id, content_digest=push.commit),
                timeout=TIMEOUT_S,
            ),
            version=push.version,
        )

    def _ended(
        self, version: int, digest: str, commit: pb.CommitPushResponse | None, outcome: str
    ) -> None:
        if commit is not None:
            self.history.pushed(version, commit.content_digest)
        elif outcome in _FINAL:
            self.history.not_pushed(version, digest)

    def _repeat(self, push: Push) -> None:
        request = push.begin(0)
        begun, _ = self.call("repeat", lambda: self.stub.BeginPush(request, timeout=TIMEOUT_S))
        if begun is None:
            return
        if begun.HasField("committed"):
            if begun.committed.content_digest != push.digest:
                self.history.violate(f"version {push.version} was repeated with another answer")
        else:
            # It was deleted meanwhile, or its key is forgotten: what was begun is dropped again.
            drop = pb.AbortPushRequest(push_id=begun.push_id)
            self.call("abort", lambda: self.stub.AbortPush(drop, timeout=TIMEOUT_S))

    def _one_of_two(self, version: int, number: int) -> None:
        digest, shards = self.contents.digest(number), self.contents.shards(number)
        self.history.pushing(version, digest)
        messages = push_messages(shards, version, model=MODEL)
        answer, outcome = self.call(
            "race", lambda: self.stub.PushWeights(messages, timeout=TIMEOUT_S), version=version
        )
        self._ended(version, digest, answer.commit if answer is not None else None, outcome)

    def _broken(self, blow: signal.Signals) -> None:
        push, starts = self._new(), self.site.starts
        address, epoch = self.site.server.address, self.history.epoch
        with half_a_push(address, push.version, push.key, epoch, push.shards) as trainer:
            if trainer is not None:
                trainer.send_signal(blow)
                if blow is signal.SIGSTOP:
                    self._noticed(push, starts)
                self.done["killed" if blow is signal.SIGKILL else "frozen"] += 1
        self._see_through(push, None, NO_ANSWER)

    def _noticed(self, push: Push, starts: int) -> None:
        begun = time.monotonic()
        while starts == self.site.starts and self.site.pid:
            if self._streams(push.version) == 0:
                return
            if time.monotonic() - begun > _NOTICED_S:
                self.history.violate(f"a stream was silent for {_NOTICED_S:g} s and still open")
                return
            time.sleep(0.1)

    def _streams(self, version: int) -> int | None:
        with contextlib.suppress(Exception):
            status = self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
            return sum(p.streams for p in status.models[0].pushes if p.version == version)
        return None

    def _durable(self, push: Push) -> bool:
        end = time.monotonic() + 3
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                status = self.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
                ids = [p.push_id for p in status.models[0].pushes if p.version == push.version]
                told = self.stub.GetPush(pb.GetPushRequest(push_id=ids[0]), timeout=5)
                if any(shard.durable_bytes for shard in told.shards):
                    return True
            time.sleep(0.05)
        return False
