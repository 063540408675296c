"""A real vLLM whose applies are gated by probes: what an export did wrong is never served."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.trained_models import FAULTS, Trained, faulty
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync_client import AbortedError, Client, Gate, Probes, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1500)]

_PROMPT = "The server stages a version"


@dataclass
class _Site:
    trained: Trained
    vllm: VllmServer
    server: WeightSyncServer
    root: Path
    probes: Probes
    good: Path
    #: Folders made so far.
    made: int = 0

    @contextlib.contextmanager
    def client(self) -> Iterator[Client]:
        with Client(self.server.address) as client:
            yield client

    def step(self, rate: float) -> None:
        """Train on, a little, and compute the probes anew."""
        self.trained.step(rate)
        self.made += 1
        self.good = self.trained.save(self.root / f"good{self.made}")
        self.probes = Probes.of(self.trained.model, self.trained.sequences(8, 64))

    def wrong(self, change: Any) -> Path:
        self.made += 1
        return faulty(self.good, self.root / f"wrong{self.made}", change)

    def answer(self) -> tuple[str, str]:
        """Return one token that vLLM answers, and the version that it names."""
        body = {"model": "model", "prompt": _PROMPT, "max_tokens": 1, "temperature": 0}
        with self.vllm.ask("/v1/completions", body) as answer:
            content = json.loads(answer.read())
            assert answer.status == 200, content
            return content["choices"][0]["text"], answer.headers["x-weightsync-version"]

    @contextlib.contextmanager
    def hammered(self) -> Iterator[set[str]]:
        """Ask without a break from four threads; yields the versions that answers named."""
        over, seen, faults = threading.Event(), set[str](), list[BaseException]()

        def ask() -> None:
            try:
                while not over.is_set():
                    seen.add(self.answer()[1])
            except BaseException as error:
                faults.append(error)
                raise

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield seen
        finally:
            over.set()
            for thread in threads:
                thread.join(60)
        assert not faults


@pytest.fixture(
    scope="module",
    params=[
        ("qwen3", 0),
        pytest.param(("qwen3", 150), marks=pytest.mark.battery),
        pytest.param(("qwen3_moe", 150), marks=pytest.mark.battery),
    ],
    ids=["random", "trained", "experts"],
)
def site(request: pytest.FixtureRequest) -> Iterator[_Site]:
    root = Path(tempfile.mkdtemp(prefix="gate"))
    arch, steps = request.param
    trained = Trained(arch, root, steps)
    good = trained.save(root / "good0")
    run = root / "run"
    vllm = VllmServer(good, run, dtype="bfloat16")
    server = WeightSyncServer(run, root / "state", flags=["--slots", "3"])
    try:
        vllm.start()
        server.start()
        server.wait_serving()
        probes = Probes.of(trained.model, trained.sequences(8, 64))
        yield _Site(trained, vllm, server, root, probes, good)
    finally:
        server.stop()
        vllm.stop()
        shutil.rmtree(root, ignore_errors=True)


def test_what_is_right_goes_live_and_tells_its_floor(site: _Site) -> None:
    site.step(1e-4)
    with site.client() as client:
        version = client.push(site.good, probes=site.probes).version
        gate = client.apply(version).gate
        assert gate is not None
        assert (gate.outcome, gate.nan, gate.tokens) == ("passed", 0, 8 * 63)
        assert 0 < gate.k3 < 1e-3 < gate.k3_limit
        assert gate.step_k3 is not None
        assert gate.took_s < 5
        # It is scored again beside generation, and nothing is changed.
        again = client.verify(score=True).engines[0].gate
        assert again is not None
        assert again.k3 == pytest.approx(gate.k3, rel=0.5)
        assert client.apply(version).gate is None


def test_each_fault_of_an_export_is_rolled_back_and_never_served(site: _Site) -> None:
    site.step(1e-4)
    with site.client() as client:
        live = client.push(site.good, probes=site.probes).version
        client.apply(live)
        answer = site.answer()[0]
        refused: set[str] = set()
        with site.hammered() as seen:
            for name, change in FAULTS[site.trained.arch].items():
                version = client.push(site.wrong(change), probes=site.probes).version
                refused.add(str(version))
                with pytest.raises(AbortedError) as error:
                    client.apply(version)
                assert error.value.reason is Reason.APPLY_RESTORED, (name, error.value)
                wanted = "not numbers" if "NaN" in name else "k3"
                assert wanted in str(error.value), (name, error.value)
                assert client.verify().version == live
        assert seen == {str(live)}
        assert site.answer() == (answer, str(live))
        for one in client.versions():
            if str(one.version) in refused:
                assert one.serving == "rejected"


def test_what_is_held_is_skipped_until_it_is_accepted(site: _Site) -> None:
    site.step(1e-4)
    fault = FAULTS[site.trained.arch]["keys and values swapped"]
    with site.client() as client:
        live = client.push(site.good, probes=site.probes).version
        client.apply(live)
        held = client.push(site.wrong(fault), probes=site.probes).version
        with pytest.raises(AbortedError) as error:
            client.apply(held, gate=Gate(on_fail="hold"))
        assert error.value.reason is Reason.APPLY_RESTORED
        assert client.get_version(held).serving == "held"
        assert client.apply().version == live
        with pytest.raises(RefusedError) as held_error:
            client.apply(held)
        assert held_error.value.reason is Reason.GATE_HELD
        report = client.apply(held, clear_rejected=True, gate=Gate(on_fail="report"))
        assert report.gate is not None
        assert (report.version, report.gate.outcome) == (held, "reported")
        client.rollback()
        assert site.answer()[1] == str(live)


def test_after_the_resume_it_is_rolled_back_too(site: _Site) -> None:
    site.step(1e-4)
    with site.client() as client:
        live = client.push(site.good, probes=site.probes).version
        assert client.apply(live, gate=Gate(when="after")).gate is not None
        fault = FAULTS[site.trained.arch]["transposed"]
        wrong = client.push(site.wrong(fault), probes=site.probes).version
        with pytest.raises(AbortedError) as error:
            client.apply(wrong, gate=Gate(when="after"))
        assert error.value.reason is Reason.APPLY_RESTORED
        assert client.verify().version == live
        assert client.get_version(wrong).serving == "rejected"


def test_a_step_that_is_too_large_is_told_from_an_export_that_is_wrong(site: _Site) -> None:
    site.step(1e-4)
    with site.client() as client:
        client.apply(client.push(site.good, probes=site.probes).version)
        site.step(0.03)
        far = client.push(site.good, probes=site.probes).version
        with pytest.raises(AbortedError, match="step_k3_limit"):
            client.apply(far, gate=Gate(step_k3_limit=0.05, on_fail="hold"))
        report = client.apply(far, clear_rejected=True)
        assert report.gate is not None
        assert report.gate.step_k3 is not None
        assert report.gate.step_k3 > 0.05 > report.gate.k3


@pytest.mark.battery
def test_no_version_of_500_that_are_right_is_refused(site: _Site) -> None:
    with site.client() as client:
        for _ in range(500):
            site.step(1e-5)
            version = client.push(site.good, probes=site.probes).version
            gate = client.apply(version).gate
            assert gate is not None
            assert gate.outcome == "passed"
            shutil.rmtree(site.good)
