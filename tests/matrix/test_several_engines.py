"""A real server beside engines that are processes of their own: together, rolling, come and go."""

from __future__ import annotations

import base64
import json
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest
import xxhash

from tests.support.following import until
from tests.support.memory_bridge import memory_bridge
from tests.support.several_engines import engine_host
from tests.support.weightsync_server import short_server
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import ApplyOutcome, Client, EngineState, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.several_engines import EngineHost

pytestmark = pytest.mark.timeout(120)

NAMES = ("a", "b", "c")


@pytest.fixture
def host() -> Iterator[EngineHost]:
    """A server that watches a folder; no two engines ever generate with two contents."""
    with engine_host() as made:
        yield made
        assert made.mixtures == []
        assert "Traceback" not in made.server.log, made.server.log


def test_named_engines_go_together_one_by_one_and_back() -> None:
    with engine_host(named=NAMES) as host:
        host.appear(*NAMES)
        host.all_serve(0)
        first = host.push(1)
        with host.client as client:
            report = client.apply()
            assert [one.engine for one in report.engines] == list(NAMES)
            host.all_serve(1)
            assert client.rollback().report.version == 1
            host.all_serve(0)
            assert host.mixtures == []
            second = host.push(2)
            rolled = client.apply(second, order="rolling")
            assert rolled.outcome is ApplyOutcome.APPLIED
            host.all_serve(2)
            proof = client.verify()
            assert proof.verified
            assert [one.verified for one in proof.engines] == [True] * 3
        assert first < second


def test_engines_come_and_go(host: EngineHost) -> None:
    host.appear("a", "b")
    host.all_serve(0)
    host.push(1)
    with host.client as client:
        client.apply()
        host.disappear("b")
        until(lambda: host.status().keys() == {"a"}, "it is shown no more")
        # Whatever its own checkpoint is: it serves what the host serves.
        host.appear("c", content=5)
        host.appear("b")
        host.all_serve(1)
        host.push(2)
        assert [one.engine for one in client.apply().engines] == list(NAMES)
        host.all_serve(2)
        assert client.rollback().report.version == 2
        host.all_serve(1)


def test_an_engine_that_appears_during_an_apply_serves_afterwards(host: EngineHost) -> None:
    host.appear("a", "b")
    host.all_serve(0)
    host.push(1)
    host.plan("host.still=1*sleep(2)")

    def call() -> None:
        with host.client as client:
            client.apply()

    thread = threading.Thread(target=call)
    thread.start()
    until(lambda: host.hit("host.still"), "all stand still")
    host.appear("c", content=3)
    seen = set()
    while thread.is_alive():
        seen.add(host.serves()["c"])
        time.sleep(0.01)
    thread.join()
    assert seen <= {None, 1}
    host.all_serve(1)


def test_an_engine_of_another_model_stays_paused_and_is_named(host: EngineHost) -> None:
    host.appear("a", "b")
    host.all_serve(0)
    other = {"other": ("F32", (4,), bytes(16))}
    socket = host.folder / "x.sock"
    with memory_bridge(host.server.run_dir, other, socket=socket) as engine:
        until(lambda: _state(host, "x") is EngineState.FENCED, "it is refused")
        assert "layer.0.weight is extra" in host.status()["x"].reason
        version = host.push(1)
        with host.client as client:
            report = client.apply()
        absent = {one.engine: one.absent for one in report.engines}
        assert (absent["a"], absent["b"]) == ("", "")
        assert "layer.0.weight is extra" in absent["x"]
        assert engine.version == 0
        assert engine.events.count("resume") == 0
        status = host.status()
        assert (status["a"].live_version, status["b"].live_version) == (version, version)
        assert status["x"].state is EngineState.FENCED


def _state(host: EngineHost, name: str) -> EngineState | None:
    status = host.status().get(name)
    return status.state if status is not None else None


def test_the_first_of_engines_that_differ_is_the_checkpoint(host: EngineHost) -> None:
    host.appear("a")
    host.all_serve(0)
    host.appear("b", content=4)
    host.all_serve(0)
    host.server.kill()
    host.server.start()
    host.all_serve(0)


def test_without_engines_pushes_are_taken_and_applies_refused() -> None:
    with (
        short_server(store="memory://", flags=["--engine=none"]) as server,
        Client(server.address) as client,
    ):
        version = client.push({"w": np.ones(4, np.float32)}).version
        assert client.get_version(version).version == version
        with pytest.raises(UnavailableError, match=r"no engine \(--engine is none\); start"):
            client.apply(version)
        (model,) = client.status().models
        assert (model.live_version, model.engines) == (0, ())


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--engine=unix:/x/a.sock", "--engine=unix:/y/a.sock"), "would be called a; give"),
        (("--engine=memory", "--engine=unix:/x/a.sock"), "name engine memory alone"),
        (("--engine=none", "--engine=unix:/x/a.sock"), "name engine none alone"),
        (("--engine=unix:/x/a.sock", "--engines=/x"), "give engines, a folder of engines"),
        (("--engine=grpc://a",), "engine must be unix:PATH"),
    ],
)
def test_what_cannot_be_is_one_sentence(
    tmp_path: Path, flags: tuple[str, ...], sentence: str
) -> None:
    command = [sys.executable, "-m", "weightsync_server.cli", f"--state-dir={tmp_path}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode != 0
    assert sentence in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_state_of_the_release_before_is_taken_over() -> None:
    with engine_host(named=("engine",)) as host:
        host.appear("engine")
        host.all_serve(0)
        live = host.push(1)
        request = pb.ApplyVersionRequest(model="default", idempotency_key="once")
        first = host.server.stub.ApplyVersion(request, timeout=30).report
        assert first.version == live
        host.server.kill()
        _make_old(host.server.state_dir / "journal")
        # Beside other engines, whose names it never heard of.
        host.server.flags = [
            flag for flag in host.server.flags if not flag.startswith("--engine=")
        ] + ["--engine=none", f"--engines={host.folder}"]
        host.disappear("engine")
        host.server.start()
        host.appear("a", "b")
        host.all_serve(1)
        host.push(2)
        again = host.server.stub.ApplyVersion(request, timeout=30).report
        assert (again.version, again.previous_version) == (live, 1)
        host.all_serve(1)
        with host.client as client:
            assert client.rollback().report.version == 1
        host.all_serve(0)


def _make_old(journal: Path) -> None:
    """Write the records as a release with one engine did: without its name."""
    lines = []
    for line in journal.read_bytes().splitlines():
        facts = json.loads(line.partition(b" ")[2])
        assert facts.pop("engine") == "engine"
        answer = facts.get("answer") or {}
        if answer.get("reply"):
            reply = pb.ApplyVersionResponse.FromString(base64.b64decode(answer["reply"]))
            reply.ClearField("engines")
            answer["reply"] = base64.b64encode(reply.SerializeToString()).decode()
        body = json.dumps(facts).encode()
        lines.append(f"{xxhash.xxh3_64_hexdigest(body)} ".encode() + body + b"\n")
    journal.write_bytes(b"".join(lines))
