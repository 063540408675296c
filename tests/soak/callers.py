"""What those who use the service while it fails have in common: each call is recorded."""

from __future__ import annotations

import random
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import grpc

from tests.soak.history import NO_ANSWER
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tests.soak.contents import Contents
    from tests.soak.history import History
    from tests.soak.site import Site

__all__ = ["FIRST", "MODEL", "TIMEOUT_S", "Caller", "pull"]

MODEL = "default"
#: The engine's checkpoint.
FIRST = 1
TIMEOUT_S = 30.0
#: After these nobody knows what the call did.
_OPEN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
_NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
#: How often a caller does what it was wished to do, where somebody wishes anything.
_WISHED = 0.85

_T = TypeVar("_T")


class Caller(ABC):
    """Calls the server step by step and records what came of it.

    Args:
        site: The processes.
        contents: What is pushed.
        history: The record.
        seed: Of all choices.
        address: Where it reaches the server.

    Attributes:
        busy: Held during a step, so that others can wait until none is under way.
        wish: The act that somebody waits for; empty: none.
        done: How often an act was seen through, where that can be told.
        seen: How often calls ended how.
    """

    #: How often each act is chosen when nobody wishes anything.
    acts: ClassVar[Mapping[str, int]]

    def __init__(
        self, site: Site, contents: Contents, history: History, seed: int, address: str
    ) -> None:
        self.site = site
        self.contents = contents
        self.history = history
        self.rng = random.Random(seed)
        self.busy = threading.Lock()
        self.wish = ""
        self.done: Counter[str] = Counter()
        self.seen: Counter[str] = Counter()
        self._channel = grpc.insecure_channel(
            address, options=(("grpc.max_reconnect_backoff_ms", 200),)
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
            # Who waits for `busy` gets it.
            time.sleep(0)

    def step(self) -> None:
        """Do one thing."""
        if self.wish and self.rng.random() < _WISHED:
            chosen = self.wish
        else:
            self.rest()
            (chosen,) = self.rng.choices(list(self.acts), list(self.acts.values()))
        try:
            getattr(self, chosen)()
        except Exception as error:
            # A thread that dies in silence would make the rest of the run worth little.
            self.history.violate(f"the soak itself failed in {chosen}: {error!r}")
            raise

    @abstractmethod
    def rest(self) -> None:
        """Wait a moment between two acts that nobody wished."""

    def call(self, name: str, call: Callable[[], _T], **facts: object) -> tuple[_T | None, str]:
        """Return the answer and "ok"; or None, and the reason of a refusal or NO_ANSWER."""
        start = (self.site.pid, self.site.starts)
        try:
            answer = call()
        except grpc.RpcError as error:
            outcome = self._refused(name, error, start)
            self.seen[outcome] += 1
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


def pull(
    stub: weightsync_pb2_grpc.WeightSyncStub, version: int, pause_s: float = 0.0
) -> dict[int, bytes]:
    """Return the bytes of each shard of a version, read as slowly as is wished."""
    shards: dict[int, bytearray] = defaultdict(bytearray)
    request = pb.PullWeightsRequest(model=MODEL, version=version, chunk_bytes=64 << 10)
    for message in stub.PullWeights(request, timeout=TIMEOUT_S):
        time.sleep(pause_s)
        if message.HasField("chunk"):
            shards[message.chunk.shard] += message.chunk.data
    return {index: bytes(data) for index, data in shards.items()}
