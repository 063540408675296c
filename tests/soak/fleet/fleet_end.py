"""What is looked at when all faults of a fleet are over."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

import grpc

from tests.soak.callers import MODEL, pull
from tests.soak.contents import digest_of
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tests.soak.fleet.fleet_record import FleetRecord
    from tests.soak.fleet.fleet_site import FleetServer, FleetSite
    from tests.soak.history import History
    from tests.soak.trainer import Trainer

__all__ = ["FleetEnd"]

_TRIES = 5


class FleetEnd:
    """Compares versions, decisions and what servers say of themselves with the record.

    Args:
        site: The processes.
        history: What was asked and answered.
        record: What was seen.
        trainer: Knows the contents.

    Attributes:
        compared: Versions that were read back.
    """

    def __init__(
        self, site: FleetSite, history: History, record: FleetRecord, trainer: Trainer
    ) -> None:
        self.compared = 0
        self._site, self._history, self._record = site, history, record
        self._trainer = trainer

    def look(self, answers: Mapping[int, str]) -> None:
        """Look at everything; what is wrong goes into the history.

        Args:
            answers: What callers were answered to be decided, by number of the apply.
        """
        self._versions()
        self._decisions(answers)
        for one in self._site.servers:
            self._invariants(one)

    def _versions(self) -> None:
        stub = self._trainer.stub
        request = pb.ListVersionsRequest(model=MODEL)
        found: list[pb.VersionInfo] = []
        while True:
            page = stub.ListVersions(request, timeout=60)
            found += page.versions
            if not page.next_page_token:
                break
            request.page_token = page.next_page_token
        acknowledged = dict(self._history.committed)
        self._history.check_versions(found, "", restarted=True)
        for version, digest in sorted(acknowledged.items()):
            if self._pulled(version) != digest:
                self._history.lost.add(version)
                self._history.violate(f"version {version} cannot be read back as it was pushed")
            self.compared += 1

    def _pulled(self, version: int) -> str:
        for _ in range(_TRIES):
            with contextlib.suppress(grpc.RpcError):
                shards = pull(self._trainer.stub, version)
                return digest_of([shards[index] for index in sorted(shards)])
        return ""

    def _decisions(self, answers: Mapping[int, str]) -> None:
        for number, decision in answers.items():
            seen = self._record.applies.get(number)
            outcome = seen.outcome if seen is not None else "nothing"
            if outcome != decision:
                self._history.violate(
                    f"apply {number} was answered with {decision}, etcd had {outcome}"
                )

    def _invariants(self, one: FleetServer) -> None:
        status = one.server.stub.GetStatus(pb.GetStatusRequest(), timeout=60)
        broken = {name: count for name, count in status.invariant_violations.items() if count}
        if broken:
            self._history.violate(f"{one.name} itself counts {broken}")
        for line in one.server.log.splitlines():
            if "invariant " in line and "was violated" in line:
                self._history.violate(f"{one.name} logged: {line}")
