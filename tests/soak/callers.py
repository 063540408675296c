"""Those who use the service while it fails: a trainer and a controller, each in a thread."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from itertools import islice
from typing import TYPE_CHECKING, Any, TypeVar

import grpc

from tests.soak.contents import digest_of
from tests.soak.history import NO_ANSWER
from tests.support.stock import CHUNK, layout_part, push_messages
from weightsync.errors import Reason
from weightsync.rpc_status import from_call
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.soak.contents import Contents, Shards
    from tests.soak.history import History
    from tests.soak.site import Site

__all__ = ["MODEL", "Caller", "Controller", "Trainer", "pull"]

MODEL = "default"
#: The engine's checkpoint.
FIRST = 1
_TIMEOUT_S = 30.0
#: After these nobody knows what the call did.
_OPEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)

_T = TypeVar("_T")


class Caller(ABC):
    """Calls the server step by step and records what came of it.

    Attributes:
        busy: Held during a step, so that others can wait until none is under way.
    """

    def __init__(self, site: Site, contents: Contents, history: History, seed: int) -> None:
        self.site = site
        self.contents = contents
        self.history = history
        self.rng = random.Random(seed)
        self.busy = threading.Lock()
        self._channel = grpc.insecure_channel(
            site.server.address, options=(("grpc.max_reconnect_backoff_ms", 200),)
        )
        self.stub = weightsync_pb2_grpc.WeightSyncStub(self._channel)

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def run(self, goes_on: threading.Event, over: threading.Event) -> None:
        """Take steps until it is over, and none while the others are to stand still."""
        while not over.is_set():
            goes_on.wait(1)
            with self.busy:
                if goes_on.is_set() and not over.is_set():
                    self.step()

    @abstractmethod
    def step(self) -> None:
        """Do one thing."""

    def call(self, name: str, call: Callable[[], _T], **facts: object) -> tuple[_T | None, str]:
        """Return the answer and "ok"; or None, and the reason of a refusal or NO_ANSWER."""
        start = (self.site.pid, self.site.starts)
        try:
            answer = call()
        except grpc.RpcError as error:
            outcome = self._refused(name, error, start)
            self.history.record(name, outcome, **facts)
            if outcome == NO_ANSWER:
                time.sleep(0.1)
            return None, outcome
        self.history.record(name, "ok", **facts)
        return answer, "ok"

    def _refused(self, name: str, error: Any, start: tuple[int, int]) -> str:
        code = error.code()
        told = from_call(error)
        if code in _NEVER and (told or (start == (self.site.pid, self.site.starts) and start[0])):
            self.history.violate(f"{name} was answered with {code.name}: {error.details()}")
        if code in (*_OPEN, *_NEVER) or told is None:
            return NO_ANSWER
        return str(told.reason)


class Trainer(Caller):
    """Pushes, cuts, resumes, repeats, races, and comes back with an old epoch."""

    def step(self) -> None:
        """Do one thing."""
        # Some hundred versions in a run: each is read back at its end.
        time.sleep(self.rng.uniform(0, 0.3))
        chosen = self.rng.choices(
            [self.push, self.race, self.stale, self.acquire], weights=[75, 8, 8, 9]
        )[0]
        chosen()

    def push(self) -> None:
        """Push a new version, in several attempts if need be."""
        version, number = self.history.next_version(), self.rng.randrange(self.contents.count)
        digest, shards = self.contents.digest(number), self.contents.shards(number)
        self.history.pushing(version, digest)
        key = f"{version}-{self.rng.randrange(1 << 30)}"
        messages = push_messages(
            shards, version, epoch=self.history.epoch, idempotency_key=key, model=MODEL
        )
        if self.rng.random() < 0.3:
            # Never the commit: the rest comes on another stream.
            messages = islice(messages, self.rng.randint(1, 2 + 2 * len(shards)))
        answer, outcome = self.call(
            "push", lambda: self.stub.PushWeights(messages, timeout=_TIMEOUT_S), version=version
        )
        commit = answer.commit if answer is not None and answer.HasField("commit") else None
        for _ in range(4):
            if commit is not None or outcome not in ("ok", NO_ANSWER):
                break
            commit, outcome = self._resume(version, key, shards)
        self._ended(version, digest, commit, outcome)
        if commit is not None and self.rng.random() < 0.3:
            self._repeat(version, key, digest)

    def _resume(
        self, version: int, key: str, shards: Shards
    ) -> tuple[pb.CommitPushResponse | None, str]:
        request = pb.BeginPushRequest(
            model=MODEL,
            version=version,
            idempotency_key=key,
            epoch=self.history.epoch,
            shard_count=len(shards),
        )
        begun, outcome = self.call(
            "begin", lambda: self.stub.BeginPush(request, timeout=_TIMEOUT_S), version=version
        )
        if begun is None:
            return None, outcome
        if begun.HasField("committed"):
            return begun.committed, "ok"
        sent, outcome = self.call(
            "resume",
            lambda: self.stub.PushWeights(_rest(shards, begun), timeout=_TIMEOUT_S),
            version=version,
        )
        if sent is None:
            return None, outcome
        return self.call(
            "commit",
            lambda: self.stub.CommitPush(
                pb.CommitPushRequest(push_id=begun.push_id), timeout=_TIMEOUT_S
            ),
            version=version,
        )

    def _ended(
        self, version: int, digest: str, commit: pb.CommitPushResponse | None, outcome: str
    ) -> None:
        if commit is not None:
            self.history.pushed(version, commit.content_digest)
        elif outcome in (Reason.EPOCH_STALE, Reason.VERSION_NOT_ABOVE, Reason.VERSION_CONFLICT):
            self.history.not_pushed(version, digest)

    def _repeat(self, version: int, key: str, digest: str) -> None:
        request = pb.BeginPushRequest(model=MODEL, version=version, idempotency_key=key)
        begun, _ = self.call("repeat", lambda: self.stub.BeginPush(request, timeout=_TIMEOUT_S))
        if begun is None:
            return
        if begun.HasField("committed"):
            if begun.committed.content_digest != digest:
                self.history.violate(f"version {version} was repeated with another answer")
        else:
            # A restart forgets keys: the version is pushed again, and must be dropped here.
            drop = pb.AbortPushRequest(push_id=begun.push_id)
            self.call("abort", lambda: self.stub.AbortPush(drop, timeout=_TIMEOUT_S))

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

    def _one_of_two(self, version: int, number: int) -> None:
        digest, shards = self.contents.digest(number), self.contents.shards(number)
        self.history.pushing(version, digest)
        messages = push_messages(shards, version, model=MODEL)
        answer, outcome = self.call(
            "race", lambda: self.stub.PushWeights(messages, timeout=_TIMEOUT_S), version=version
        )
        self._ended(version, digest, answer.commit if answer is not None else None, outcome)

    def stale(self) -> None:
        """Push as a trainer that slept through the newest epoch."""
        epoch = self.history.epoch - 1
        if epoch < 1:
            return
        version, number = self.history.next_version(), self.rng.randrange(self.contents.count)
        self.contents.digest(number)
        messages = push_messages(self.contents.shards(number), version, epoch=epoch, model=MODEL)
        answer, outcome = self.call(
            "stale push", lambda: self.stub.PushWeights(messages, timeout=_TIMEOUT_S), epoch=epoch
        )
        if answer is not None:
            self.history.violate(f"epoch {epoch} pushed version {version} as a stale writer")
        elif outcome not in (Reason.EPOCH_STALE, Reason.LIMIT_EXCEEDED, NO_ANSWER):
            self.history.violate(f"a stale writer was refused with {outcome}")

    def acquire(self) -> None:
        """Become the writer."""
        request = pb.AcquireEpochRequest(model=MODEL, holder="soak")
        answer, _ = self.call("epoch", lambda: self.stub.AcquireEpoch(request, timeout=_TIMEOUT_S))
        if answer is not None:
            self.history.acquired(answer.epoch)


class Controller(Caller):
    """Applies, rolls back, deletes, pins, pulls and verifies."""

    def step(self) -> None:
        """Do one thing."""
        chosen = self.rng.choices(
            [self.apply, self.rollback, self.delete, self.pin, self.compare, self.verify],
            weights=[45, 12, 18, 8, 12, 5],
        )[0]
        chosen()

    def apply(self) -> None:
        """Make a version live, sometimes twice with one key."""
        committed, before = self.history.snapshot()
        above = [version for version in committed if version > max(before, default=0)]
        if not above:
            time.sleep(0.05)
            return
        version = self.rng.choice(above[-3:])
        request = pb.ApplyVersionRequest(
            model=MODEL,
            version=version,
            clear_rejected=True,
            idempotency_key=f"a{self.rng.randrange(1 << 30)}",
        )
        self.history.switching(version)
        for _ in range(1 + (self.rng.random() < 0.2)):
            answer, outcome = self.call(
                "apply",
                lambda: self.stub.ApplyVersion(request, timeout=_TIMEOUT_S),
                version=version,
            )
            self._switched("apply", answer, outcome, before)

    def rollback(self) -> None:
        """Go back."""
        _, before = self.history.snapshot()
        request = pb.RollbackRequest(model=MODEL, reason="soak")
        self.history.switching(0)
        answer, outcome = self.call(
            "rollback", lambda: self.stub.Rollback(request, timeout=_TIMEOUT_S)
        )
        self._switched("rollback", answer, outcome, before)

    def _switched(self, name: str, answer: Any, outcome: str, before: set[int]) -> None:
        if answer is None:
            # A fence leaves it to the ranks what is live in the end.
            if outcome not in (NO_ANSWER, Reason.ENGINE_FENCED):
                self.history.not_switched(before)
            return
        report = answer.report
        expected = self.history.snapshot()[0].get(report.version)
        digests = {rank.content_digest for rank in report.ranks}
        if digests != {expected}:
            self.history.violate(f"{name} of version {report.version} was answered with {digests}")
        self.history.switched(report.version)

    def delete(self) -> None:
        """Delete one of the older versions."""
        committed, live = self.history.snapshot()
        old = sorted(set(committed) - live)[1:-6]
        if not old:
            return
        version = self.rng.choice(old)
        request = pb.DeleteVersionRequest(model=MODEL, version=version)
        self.history.deleting(version)
        answer, outcome = self.call(
            "delete", lambda: self.stub.DeleteVersion(request, timeout=_TIMEOUT_S), version=version
        )
        if answer is not None:
            self.history.deleted(version)
        elif outcome in (Reason.VERSION_IN_USE, Reason.ENGINE_AWAY):
            self.history.not_deleted(version)

    def pin(self) -> None:
        """Pin a version, then let it go."""
        committed, _ = self.history.snapshot()
        if committed:
            version = self.rng.choice(list(committed))
            for pinned in (True, False):
                request = pb.PinVersionRequest(model=MODEL, version=version, pinned=pinned)
                self.call("pin", lambda r=request: self.stub.PinVersion(r, timeout=_TIMEOUT_S))  # type: ignore[misc]

    def compare(self) -> None:
        """Pull a version and compare every byte."""
        committed, _ = self.history.snapshot()
        if committed:
            self.pull(self.rng.choice(list(committed)))

    def pull(self, version: int) -> str:
        """Pull one version and compare every byte; return how the call ended."""
        digest = self.history.snapshot()[0].get(version, "")
        shards, outcome = self.call("pull", lambda: pull(self.stub, version), version=version)
        number = self.contents.known.get(digest)
        if shards is None:
            return outcome
        found = [shards[index] for index in sorted(shards)]
        expected = [] if number is None else [data for _, data in self.contents.shards(number)]
        # The engine's checkpoint may lie in other files than a push of the same content.
        same = found == expected or (version == FIRST and digest_of(found) == digest)
        if number is not None and not same:
            self.history.violate(f"version {version} came back with other bytes")
        return outcome

    def verify(self) -> None:
        """Prove what the ranks hold."""
        request = pb.VerifyVersionRequest(model=MODEL)
        answer, _ = self.call("verify", lambda: self.stub.VerifyVersion(request, timeout=60))
        if answer is not None and not answer.verified:
            self.history.violate(f"the ranks do not hold version {answer.version}")


def _rest(shards: Shards, begun: pb.BeginPushResponse) -> Iterator[pb.PushWeightsRequest]:
    """Yield what a push still lacks, on a stream that joins it."""
    here = {progress.shard: progress.received_bytes for progress in begun.shards}
    yield pb.PushWeightsRequest(join=pb.JoinPush(push_id=begun.push_id))
    for index, (name, data) in enumerate(shards):
        if index not in here:
            yield pb.PushWeightsRequest(layout=layout_part(index, name, data))
        for offset in range(here.get(index, 0), len(data), CHUNK):
            part = pb.Chunk(shard=index, offset=offset, data=data[offset : offset + CHUNK])
            yield pb.PushWeightsRequest(chunk=part)


def pull(stub: weightsync_pb2_grpc.WeightSyncStub, version: int) -> dict[int, bytes]:
    """Return the bytes of each shard of a version."""
    shards: dict[int, bytearray] = defaultdict(bytearray)
    request = pb.PullWeightsRequest(model=MODEL, version=version)
    for message in stub.PullWeights(request, timeout=_TIMEOUT_S):
        if message.HasField("chunk"):
            shards[message.chunk.shard] += message.chunk.data
    return {index: bytes(data) for index, data in shards.items()}
