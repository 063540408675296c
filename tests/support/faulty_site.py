"""A real vLLM and a real server beside it that fail together, by one plan of failpoints."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc

from tests.support.completion import Completion
from tests.support.models import make_checkpoint, nudge_checkpoint
from tests.support.processes import state
from tests.support.stock import push_folder
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason, WeightSyncError
from weightsync.failpoints import VARIABLE
from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.rpc_status import from_call

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["COMMIT_S", "LEASE_S", "FaultySite", "running_site"]

_PROMPT = "the quick brown fox"
#: Lease of a pause and longest commit, seconds: short, so that what hangs is noticed soon.
LEASE_S, COMMIT_S = 2.0, 2.5
#: Longest time until one verified version is served, seconds: a loader may have to start first.
_SERVING_S = 150.0


class FaultySite:
    """Versions alternate between two checkpoints whose first tokens differ.

    Args:
        tp: Tensor parallel size of vLLM.
        alike: Whether they alternate between `b` and `c`, which differ in few values, so that every
            apply is a patch; else between `a` and `b`, which differ in all.
        rank: Which of vLLM's ranks alone comes by failpoints, `dp/pp/tp`; "": all of them do.
        pp: Pipeline parallel size of vLLM.
        dp: Data parallel size of vLLM.
        slots: Of the server; 0: as many as it has by itself.
        slower: Times that its leases are longer: for ranks that share cores with another vLLM's.
        variables: More environment variables of vLLM.
        options: Of the checkpoints; see `make_checkpoint`.

    Attributes:
        served: Every answer seen while `watched`: a checkpoint's name or an HTTP status.
    """

    def __init__(
        self,
        tp: int = 1,
        *,
        alike: bool = False,
        rank: str = "",
        pp: int = 1,
        dp: int = 1,
        slots: int = 0,
        slower: float = 1.0,
        variables: Mapping[str, str] | None = None,
        **options: Any,
    ) -> None:
        options = {"dtype": "bfloat16", **options}
        # Unix sockets allow 107 bytes, which pytest's own folders exceed.
        self.root = Path(tempfile.mkdtemp(prefix="wf-"))
        self.plan = self.root / "plan"
        self.folders = {
            name: make_checkpoint(self.root / name, seed=seed, **options)
            for seed, name in enumerate("ab")
        }
        self.folders["c"] = nudge_checkpoint(self.folders["b"], self.root / "c")
        self.pair = ("b", "c") if alike else ("a", "b")
        self._fault = self.root / "fault.json"
        points = {VARIABLE: f"@{self.plan}"}
        self.vllm = VllmServer(
            self.folders[self.pair[0]],
            self.root / "run",
            tp=tp,
            pp=pp,
            dp=dp,
            dtype=options["dtype"],
            start_s=240.0 * tp * pp * dp,
            flags=["--worker-extension-cls", "tests.support.fault_extension.FaultExtension"],
            variables={
                **points,
                **(variables or {}),
                "WEIGHTSYNC_TEST_FAULT": str(self._fault),
                "WEIGHTSYNC_TEST_RANK": rank,
            },
        )
        times = {"--pause-lease-s": LEASE_S, "--commit-timeout-s": COMMIT_S}
        flags = [f"{flag}={seconds * slower}" for flag, seconds in times.items()]
        if slots:
            flags += ["--slots", str(slots)]
        self.server = WeightSyncServer(
            self.root / "run", self.root / "state", flags=flags, variables=points
        )
        #: How an apply pauses.
        self.pause = pb.PauseOptions()
        self.expected: dict[str, Completion] = {}
        self.content: dict[int, str] = {1: self.pair[0]}
        self.served: list[str] = []

    def start(self) -> None:
        """Start both, and learn what each checkpoint answers when nothing fails."""
        self.server.start()
        self.vllm.start()
        self.server.wait_serving(_SERVING_S)
        self.expected[self.pair[0]] = self._answer()
        for name in ("c", "b") if self.pair == ("a", "b") else ("c",):
            self.apply(self.push(name))
            assert self.server.stub.VerifyVersion(
                pb.VerifyVersionRequest(model="default"), timeout=60
            ).verified
            self.expected[name] = self._answer()
        assert len({str(answer) for answer in self.expected.values()}) == len(self.expected)

    def stop(self) -> None:
        """Stop both and remove everything."""
        self.disarm()
        self.let_go_on()
        try:
            self.server.stop()
        finally:
            self.vllm.stop()
            shutil.rmtree(self.root)

    # What fails

    def arm(self, plan: str) -> None:
        """Let everything fail as planned from now on."""
        self._hits.unlink(missing_ok=True)
        self.plan.write_text(plan)

    def fault(self, **order: Any) -> None:
        """Let the next commit in a worker go wrong; see `fault_extension`."""
        self._fault.write_text(json.dumps(order))

    def disarm(self) -> None:
        """Let nothing fail any more."""
        self.plan.unlink(missing_ok=True)

    def met(self, timeout_s: float = 0.0) -> list[tuple[str, str, int]]:
        """Return the faults that were met: failpoint, action, process; waits for a first one."""
        end = time.monotonic() + timeout_s
        while not self._hits.exists() and time.monotonic() < end:
            time.sleep(0.01)
        lines = self._hits.read_text().splitlines() if self._hits.exists() else []
        return [(name, action, int(pid)) for name, action, pid in map(str.split, lines)]

    def let_go_on(self) -> None:
        """Continue every process that a failpoint has stopped."""
        for _, action, pid in self.met():
            if action == "stop" and state(pid) == "T":
                os.kill(pid, signal.SIGCONT)

    @property
    def _hits(self) -> Path:
        return Path(f"{self.plan}.hits")

    # What is done

    def push(self, name: str = "") -> int:
        """Push a checkpoint as a new version; by default the one of the pair that is not live."""
        live = self.server.wait_serving(_SERVING_S).live_version
        other = name or self.pair[self.content[live] == self.pair[0]]
        version = push_folder(self.server.stub, self.folders[other]).version
        self.content[version] = other
        return version

    def beside(self, name: str) -> str:
        """Make `b` or `c` live; return the other one, whose apply is then a patch."""
        if self.ask() != name:
            self.apply(self.push(name))
        return "c" if name == "b" else "b"

    def apply(self, version: int, timeout_s: float = 60) -> pb.ApplyReport:
        """Apply a version."""
        request = pb.ApplyVersionRequest(model="default", version=version, pause=self.pause)
        return self.server.stub.ApplyVersion(request, timeout=timeout_s).report

    def try_apply(self, version: int, timeout_s: float = 60) -> WeightSyncError | None:
        """Apply a version; return its refusal: SERVER_AWAY when the server died of it."""
        try:
            self.apply(version, timeout_s)
        except grpc.RpcError as error:
            told = from_call(error)
            if told is not None:
                return told
            if self.server.process is None or error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            self.server.process.wait(10)
            return WeightSyncError(Reason.SERVER_AWAY, "the server died")
        return None

    def restart_server(self) -> None:
        """Start the server again after it died."""
        self.server.kill()
        self.server.start()

    def recover(self) -> str:
        """Let nothing fail any more, wait until it serves; return the content that is live."""
        self.disarm()
        self.let_go_on()
        if self.server.process is None or self.server.process.poll() is not None:
            self.restart_server()
        live = self._wait_serving().live_version
        assert self.server.stub.VerifyVersion(
            pb.VerifyVersionRequest(model="default"), timeout=60
        ).verified
        assert self.ask() == self.content[live]
        return self.content[live]

    def _wait_serving(self) -> pb.ModelStatus:
        # vLLM needs seconds to find out that one of its ranks has died, and answers until then.
        deadline = time.monotonic() + _SERVING_S
        while True:
            if not self.vllm_lives():
                self.vllm.stop()
                self.vllm.start()
            try:
                return self.server.wait_serving(1)
            except TimeoutError:
                if time.monotonic() > deadline:
                    raise

    def vllm_lives(self) -> bool:
        """Whether vLLM and its engine core live."""
        with contextlib.suppress(OSError):
            return self.vllm.request("/health")[0] == 200
        return False

    # What is seen

    def ask(self) -> str:
        """Return which content answers, or the HTTP status of a refusal.

        Raises:
            AssertionError: The answer is no version's: a mixture is served.
        """
        status, answer = self._request()
        if status != 200:
            assert status in (500, 503), (status, answer)
            return str(status)
        told = Completion.read(answer)
        names = [name for name, seen in self.expected.items() if seen == told]
        assert len(names) == 1, f"a mixture is served: {told}, expected {self.expected}"
        return names[0]

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Ask vLLM without a break; fail if any answer is of neither version."""
        over = threading.Event()
        self.served = []
        faults: list[BaseException] = []

        def ask() -> None:
            while not over.is_set():
                try:
                    self.served.append(self.ask())
                except OSError:
                    self.served.append("away")
                except AssertionError as error:
                    faults.append(error)
                over.wait(0.01)

        asking = threading.Thread(target=ask)
        asking.start()
        try:
            yield
        finally:
            over.set()
            asking.join(90)
        assert not asking.is_alive(), "vLLM has not answered for long"
        assert not faults, faults[0]

    def until_served(self, *contents: str, timeout_s: float = 60) -> None:
        """Wait until who asks without a break has had answers of these contents."""
        end = time.monotonic() + timeout_s
        while not {*contents} <= {*self.served}:
            assert time.monotonic() < end, (contents, set(self.served))
            time.sleep(0.01)

    def refusal(self) -> str:
        """Return the reason with which vLLM refuses a completion."""
        status, answer = self._request()
        assert status == 503, (status, answer)
        text: str = answer["error"]["message"]
        return text

    def checked(self, version: int, timeout_s: float = 60) -> int:
        """Wait until the live parameters were compared as a whole; return the outcome."""
        request = pb.GetVersionRequest(model="default", version=version)
        end = time.monotonic() + timeout_s
        while True:
            info = self.server.stub.GetVersion(request, timeout=5).version
            if info.live_check != pb.LIVE_CHECK_PENDING:
                return info.live_check
            assert time.monotonic() < end, "it was not compared within a minute"
            time.sleep(0.02)

    def violations(self) -> int:
        """Return how many violations of invariants the server has counted."""
        status = self.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        return sum(status.invariant_violations.values())

    def _answer(self) -> Completion:
        status, answer = self._request()
        assert status == 200, answer
        return Completion.read(answer)

    def _request(self) -> tuple[int, Any]:
        # One token: a longer request may rightly begin under one version and end under another.
        body = {"model": "model", "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        return self.vllm.request("/v1/completions", {**body, "logprobs": 3})


@contextlib.contextmanager
def running_site(tp: int = 1, **options: Any) -> Iterator[FaultySite]:
    """Start a site; everything is stopped at the end."""
    site = FaultySite(tp, **options)
    try:
        site.start()
        yield site
    finally:
        site.stop()
