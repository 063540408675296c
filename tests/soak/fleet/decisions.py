"""Reads what a fleet has decided, from etcd itself and by eyes of its own."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import defaultdict
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import grpc

from tests.soak.fleet.fleet_record import SeenApply, SeenDecision
from weightsync.etcd.v3 import etcd_pb2 as pb
from weightsync.etcd.v3 import etcd_pb2_grpc
from weightsync_server.store.store_records import decode_document

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tests.soak.fleet.fleet_record import FleetRecord
    from tests.soak.history import History

__all__ = ["DecisionWatch"]

_PACE_S, _ANSWER_S = 0.1, 1.0


class DecisionWatch:
    """Puts every plan and decision into the record, with the time in which it was made.

    Args:
        addresses: HOST:PORT of etcd's members.
        prefix: What all keys of the fleet begin with, its last slash included.
        record: Where it goes.
        history: Is told what has come, and of records that have changed.

    Attributes:
        readings: How often it was read.
        read_at: When the last reading ended.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        prefix: str,
        record: FleetRecord,
        history: History,
    ) -> None:
        self.readings, self.read_at = 0, 0.0
        self._prefix, self._record, self._history = prefix.encode(), record, history
        self._channels = [grpc.insecure_channel(address) for address in addresses]
        self._stubs = [etcd_pb2_grpc.KVStub(channel) for channel in self._channels]
        #: When the last reading began that was answered.
        self._after = time.monotonic()

    def run(self, over: threading.Event) -> None:
        """Read until it is over."""
        while not over.is_set():
            self.look()
            over.wait(_PACE_S)
        for channel in self._channels:
            channel.close()

    def look(self) -> bool:
        """Read once, and return whether etcd has answered."""
        asked = time.monotonic()
        keys = self._range()
        if keys is None:
            return False
        self.readings, self.read_at = self.readings + 1, time.monotonic()
        self._take(keys, self.read_at)
        self._after = asked
        return True

    def _range(self) -> dict[str, bytes] | None:
        # Linearisable: whatever was decided before it was asked is in the answer.
        end = self._prefix[:-1] + bytes([self._prefix[-1] + 1])
        request = pb.RangeRequest(key=self._prefix, range_end=end)
        with contextlib.suppress(grpc.RpcError):
            found = self._stubs[0].Range(request, timeout=_ANSWER_S)
            return {one.key[len(self._prefix) :].decode(): one.value for one in found.kvs}
        self._stubs.append(self._stubs.pop(0))
        return None

    def _take(self, keys: dict[str, bytes], now: float) -> None:
        applies: dict[int, dict[str, bytes]] = defaultdict(dict)
        for key, value in keys.items():
            room, _, rest = key.partition("/")
            if room == "applies":
                name, _, part = rest.partition("/")
                applies[int(name)][part] = value
        for number, parts in sorted(applies.items()):
            if "plan" not in parts:
                continue
            before = self._record.applies.get(number)
            if before is None:
                before = replace(_plan(decode_document(parts["plan"]), keys), planned=now)
                self._history.note(plan=number, kind=before.kind, target=before.target)
            self._record.applies[number] = self._decided(before, parts, now)

    def _decided(self, apply: SeenApply, parts: dict[str, bytes], now: float) -> SeenApply:
        bodies = [parts[key] for key in sorted(parts) if key.startswith("decisions/")]
        known = apply.decisions
        for before, body in zip(known, bodies, strict=False):
            if before.body != body:
                self._history.violate(f"a decision on apply {apply.number} was changed to {body!r}")
        fresh = tuple(
            SeenDecision(decode_document(body)["verdict"], self._after, now, body)
            for body in bodies[len(known) :]
        )
        for one in fresh:
            self._history.note(
                apply=apply.number, kind=apply.kind, decided=decode_document(one.body)
            )
        return replace(apply, decisions=known + fresh)


def _plan(plan: dict[str, Any], keys: dict[str, bytes]) -> SeenApply:
    roster = f"rosters/{plan['nonce']}/"
    # Few members: one part.
    parts = [decode_document(keys[key]) for key in sorted(keys) if key.startswith(roster)]
    return SeenApply(
        number=plan["number"],
        kind=plan["kind"],
        target=plan["target"][1],
        waves=tuple(tuple(wave) for part in parts for wave in part["waves"]),
        needed=plan["decisions"],
        rollback=bool(plan["rejects"]),
    )
