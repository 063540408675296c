"""Who uses a fleet while it fails: a trainer that pushes, and an operator who asks for applies."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import grpc

from tests.soak.callers import MODEL, Caller
from tests.soak.fleet.fleet_site import MEMBERS
from tests.soak.history import NO_ANSWER
from tests.soak.trainer import Trainer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.v1 import weightsync_pb2_grpc
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeAlias

    from tests.soak.contents import Contents
    from tests.soak.fleet.fleet_site import FleetSite
    from tests.soak.history import History

    #: Sends a request by a stub, within so many seconds.
    _Send: TypeAlias = Callable[[Any, float], Any]

__all__ = ["FleetTrainer", "Operator"]

#: How long an answer is waited for: less than many applies take under faults, or more; seconds.
_ANSWERS_S = (6.0, 30.0)
_LAST_S = 90.0
#: How often a call is made again with its key, without an answer and with one.
_REPEATED, _ASKED_AGAIN = 0.6, 0.1


class FleetTrainer(Trainer):
    """Pushes in full and as deltas, over a link that is cut or loses an answer now and then."""

    acts: ClassVar[Mapping[str, int]] = {
        "push": 35, "delta": 45, "cut": 5, "unheard": 5, "acquire": 4,
    }  # fmt: skip

    def rest(self) -> None:
        """Leave time for applies."""
        time.sleep(self.rng.uniform(0.5, 2.5))


class Operator(Caller):
    """Asks one member or another for applies and rollbacks of the whole fleet.

    Attributes:
        asks: The member that is asked next; empty: any.
        only_barriers: Asks for no other applies.
        answers: What was answered to be decided, by number of the apply.
        switches: Applies and rollbacks that were answered with COMMIT.
    """

    acts: ClassVar[Mapping[str, int]] = {"barrier": 42, "rolling": 42, "roll_back": 16}

    def __init__(self, site: FleetSite, contents: Contents, history: History, seed: int) -> None:
        first: Any = site.members[MEMBERS[0]]
        super().__init__(first, contents, history, seed, first.server.address)
        self.asks, self.only_barriers = "", False
        self.answers: dict[int, str] = {}
        self.switches = 0
        self._members = site.members
        self._channels = {
            name: grpc.insecure_channel(
                one.server.address, options=(("grpc.max_reconnect_backoff_ms", 200),)
            )
            for name, one in site.members.items()
        }
        self._newest = 0

    def close(self) -> None:
        """Close all connections."""
        super().close()
        for channel in self._channels.values():
            channel.close()

    def rest(self) -> None:
        """Wait a moment."""
        time.sleep(self.rng.uniform(0.1, 0.8))

    def barrier(self) -> None:
        """Bring the newest version live everywhere at once."""
        self._apply(pb.ENGINE_ORDER_TOGETHER)

    def rolling(self) -> None:
        """Bring the newest version live on one member after the other."""
        self._apply(pb.ENGINE_ORDER_TOGETHER if self.only_barriers else pb.ENGINE_ORDER_ROLLING)

    def roll_back(self) -> None:
        """Go back to what was decided before."""
        request = pb.RollbackRequest(
            model=MODEL,
            scope=pb.SCOPE_FLEET,
            order=pb.ENGINE_ORDER_TOGETHER
            if self.only_barriers
            else self.rng.choice((pb.ENGINE_ORDER_TOGETHER, pb.ENGINE_ORDER_ROLLING)),
            idempotency_key=self._key(),
        )
        self._ask("fleet rollback", lambda stub, s: stub.Rollback(request, timeout=s))

    def last(self) -> str:
        """Apply the newest version when all faults are healed; return what came of it."""
        committed, _ = self.history.snapshot()
        request = self._request(max(committed), pb.ENGINE_ORDER_TOGETHER)
        _, outcome = self._once(
            "last apply", lambda stub, s: stub.ApplyVersion(request, timeout=s), _LAST_S
        )
        return outcome

    def _apply(self, order: pb.EngineOrder.ValueType) -> None:
        committed, _ = self.history.snapshot()
        newest = max(committed, default=0)
        # Where nothing came since it was asked for, there is nothing to ask for.
        if newest != self._newest:
            self._newest = newest
            request = self._request(newest, order)
            self._ask("fleet apply", lambda stub, s: stub.ApplyVersion(request, timeout=s))

    def _request(self, version: int, order: pb.EngineOrder.ValueType) -> pb.ApplyVersionRequest:
        return pb.ApplyVersionRequest(
            model=MODEL,
            version=version,
            scope=pb.SCOPE_FLEET,
            order=order,
            idempotency_key=self._key(),
        )

    def _ask(self, what: str, send: _Send) -> None:
        """Ask, and perhaps again with the same key, of any member."""
        timeout_s = self.rng.choice(_ANSWERS_S)
        known = 0
        while True:
            number, outcome = self._once(what, send, timeout_s)
            if number and known not in (0, number):
                self.history.violate(f"one key was answered with applies {known} and {number}")
            known = number or known
            again = {NO_ANSWER: _REPEATED, "ok": _ASKED_AGAIN}.get(outcome, 0.0)
            if self.rng.random() >= again:
                return

    def _once(self, what: str, send: _Send, timeout_s: float) -> tuple[int, str]:
        """Return the number of the apply, 0 where it was not answered with COMMIT, and how."""
        name = self.asks or self.rng.choice(MEMBERS)
        self.site = self._members[name]  # type: ignore[assignment]  # has what callers look at
        stub = weightsync_pb2_grpc.WeightSyncStub(self._channels[name])
        answer, outcome = self.call(what, partial(send, stub, timeout_s), member=name)
        if answer is None:
            return 0, outcome
        self._answered(answer.fleet.apply, answer.fleet.decision)
        return answer.fleet.apply, outcome

    def _refused(self, name: str, error: Any, start: tuple[int, int]) -> str:
        outcome = super()._refused(name, error, start)
        # It was decided against, and that is an answer, too.
        refusal = from_call(error)
        if outcome == Reason.APPLY_RESTORED and refusal is not None:
            self._answered(int(refusal.metadata["fleet_apply"]), "ABORT")
        return outcome

    def _answered(self, number: int, decision: str) -> None:
        self.history.note(answered=number, decision=decision)
        before = self.answers.setdefault(number, decision)
        if before != decision:
            self.history.violate(f"apply {number} was {before}, now {decision}")
        self.switches += decision == "COMMIT"

    def _key(self) -> str:
        return f"{self.rng.randrange(1 << 40):x}"
