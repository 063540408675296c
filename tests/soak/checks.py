"""What must hold whenever the callers stand still and the faults are healed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import grpc

from tests.soak.callers import MODEL
from weightsync.shm.status_page import PAGE_BYTES
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from tests.soak.controller import Controller
    from tests.soak.history import History
    from tests.soak.site import Site

__all__ = ["Checker"]

#: A service that is whole again serves within this time, counted from the start of its engine.
_SERVING_S = 30.0
_SETTLE_S = 20.0
_FETCHERS = 2
#: Connections and threads of a pool come and go.
_LOOSE_DESCRIPTORS = 12
#: What the server logs when it counts a violation itself: a server that was killed tells no more.
_VIOLATED = "invariant "


class Checker:
    """Compares the service with the history.

    Attributes:
        leaked: Most segments that were too many and stayed.
        looks: How often everything was compared.
    """

    def __init__(self, site: Site, history: History, controller: Controller, ranks: int) -> None:
        self.leaked = self.looks = 0
        self._site = site
        self._history = history
        self._controller = controller
        self._stub = controller.stub
        self._ranks = ranks
        self._descriptors = self._surplus = 0
        self._start_of: dict[str, int] = {}

    def check(self, *, restarted: bool, engine: bool = True) -> None:
        """Look at everything; what is wrong goes into the history.

        Args:
            restarted: The server was started since the last look.
            engine: There is one, so that the service must come to serve.
        """
        model = self._serving() if engine else self._model()
        if model is None:
            return
        self._drop_pushes(model)
        self._versions(restarted=restarted)
        self._history.check_epoch(model.epoch)
        if engine:
            live = model.live_version
            self._history.check_live(live, model.live_content_digest, restarted=restarted)
            self._served(model)
            self._controller.verify()
        self._leaks(restarted=restarted)
        committed, _ = self._history.snapshot()
        for version in sorted(committed)[-2:]:
            self._controller.pull(version)
        self.looks += 1

    def everything(self) -> None:
        """Pull every version there is and compare its bytes."""
        for version in sorted(self._history.snapshot()[0]):
            outcome = self._controller.pull(version)
            if outcome != "ok":
                self._history.lost.add(version)
                self._history.violate(f"version {version} cannot be read: {outcome}")
        for line in self._site.server.log.splitlines():
            if _VIOLATED in line and "was violated" in line:
                self._history.violate(f"the server logged: {line}")

    def _status(self) -> pb.GetStatusResponse | None:
        try:
            return self._stub.GetStatus(pb.GetStatusRequest(), timeout=5, wait_for_ready=True)
        except grpc.RpcError:
            return None

    def _model(self) -> pb.ModelStatus | None:
        status = self._status()
        if status is None:
            self._history.violate("the server does not answer")
            return None
        self._violations(status)
        return status.models[0]

    def _serving(self) -> pb.ModelStatus | None:
        deadline = time.monotonic() + _SERVING_S
        told = None
        while time.monotonic() < deadline:
            status = self._status()
            if status is not None:
                self._violations(status)
                told = status.models[0]
                if told.engine.state == pb.ENGINE_STATE_SERVING and told.live_version:
                    return told
            # It may have died of what was healed a moment ago, and counts from its new start.
            if self._site.revive_engine():
                deadline = time.monotonic() + _SERVING_S
            time.sleep(0.05)
        state = "does not answer" if told is None else f"{told.engine.state}: {told.engine.reason}"
        self._history.violate(f"not serving {_SERVING_S:g} s after the last fault ({state})")
        return None

    def _violations(self, status: pb.GetStatusResponse) -> None:
        start = str(status.start_time.ToNanoseconds())
        found = sum(status.invariant_violations.values())
        if found > self._start_of.get(start, 0):
            told = {name: count for name, count in status.invariant_violations.items() if count}
            self._history.violate(f"the server itself counts {told}")
        self._start_of[start] = found

    def _drop_pushes(self, model: pb.ModelStatus) -> None:
        for push in model.pushes:
            request = pb.AbortPushRequest(push_id=push.push_id)
            self._controller.call("abort", lambda r=request: self._stub.AbortPush(r, timeout=20))  # type: ignore[misc]

    def _versions(self, *, restarted: bool) -> None:
        told, _ = self._controller.call("list", self._list)
        if told is not None:
            checkpoint = self._controller.contents.digest(0)
            self._history.check_versions(told, checkpoint, restarted=restarted)
            self._controller.check_pins(told)

    def _list(self) -> list[pb.VersionInfo]:
        request = pb.ListVersionsRequest(model=MODEL)
        found: list[pb.VersionInfo] = []
        while True:
            page = self._stub.ListVersions(request, timeout=20)
            found += page.versions
            if not page.next_page_token:
                return found
            request.page_token = page.next_page_token

    def _served(self, model: pb.ModelStatus) -> None:
        told = self._site.engine.told()
        if told is not None and told["content"] != model.live_content_digest:
            self._history.violate(
                f"the engine holds {told['content']}, version {model.live_version} is live"
            )

    def _leaks(self, *, restarted: bool) -> None:
        deadline = time.monotonic() + _SETTLE_S
        while True:
            wrong = self._left_behind()
            if restarted:
                # What could not be removed is removed at the next start.
                wrong += self._files()
            if not wrong or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        self.leaked = max(self.leaked, self._surplus)
        for text in wrong:
            self._history.violate(text)

    def _left_behind(self) -> list[str]:
        status = self._status()
        self._surplus = 0
        if status is None:
            return ["the server does not answer"]
        slots = sum(slot.reserved_bytes for slot in status.models[0].slots)
        wrong = []
        if status.memory_reserved_bytes != slots:
            wrong.append(f"{status.memory_reserved_bytes} bytes are reserved, slots hold {slots}")
        segments = self._site.segments()
        pages = self._ranks * PAGE_BYTES
        if sum(segments.values()) > slots + pages:
            extra = sum(segments.values()) - slots - pages
            self._surplus = 1 + extra // max(segments.values())
            wrong.append(f"{len(segments)} segments hold {extra} bytes more than the slots")
        descriptors = self._site.descriptors()
        self._descriptors = self._descriptors or descriptors
        if descriptors > self._descriptors + _LOOSE_DESCRIPTORS:
            wrong.append(f"{descriptors} descriptors, {self._descriptors} at first")
        found = len(self._site.fetchers())
        if not found == status.fetchers == _FETCHERS:
            wrong.append(f"{found} fetchers live, the server tells {status.fetchers}")
        if len(self._site.ingesters()) != status.ingest_processes:
            wrong.append(f"{len(self._site.ingesters())} ingest processes live, not one")
        return wrong

    def _files(self) -> list[str]:
        wrong = [f"it stays: {name}" for name in self._site.leftovers()[:3]]
        committed, _ = self._history.snapshot()
        if folders := self._site.folders(MODEL) ^ committed.keys():
            wrong.append(f"folders and versions differ: {sorted(folders)[:5]}")
        return wrong
