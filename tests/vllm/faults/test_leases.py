"""A server that dies in the pause of a real vLLM, or has to do with a second one on it.

The pause is taken by a process of its own,
by the client that the server uses, so that it can be killed in it and nothing else happens.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from tests.support.faulty_site import FaultySite
from tests.support.weightsync_server import WeightSyncServer
from weightsync.v1 import weightsync_pb2 as pb

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.usefixtures("whole"),
    pytest.mark.parametrize("shared_site", [(1, False)], ids=["tp1"], indirect=True),
]

#: Of the pauses here, seconds.
_LEASE_S = 1.0
_ORDER = {"model": "model", "prompt": "One two", "max_tokens": 480, "ignore_eos": True}
#: Connects, waits for a word, pauses vLLM, and stays in the pause without renewing it.
_PAUSER = """
import asyncio, sys
from weightsync.engine import CacheUse, OnExpiry, OpenApply, PauseSpec
from weightsync_server.engine.drivers.bridge import BridgeEngine

async def main(address, end, lease_s, version):
    engine = BridgeEngine(address)
    await engine.hello()
    print("connected", flush=True)
    sys.stdin.readline()
    apply = OpenApply("a1", int(version), int(version) + 1) if end == "fence" else None
    spec = PauseSpec(cache=CacheUse.KEEP, on_expiry=OnExpiry(end), apply=apply)
    await engine.pause(spec, float(lease_s))
    print("paused", flush=True)
    await asyncio.sleep(600)

asyncio.run(main(*sys.argv[1:]))
"""


class _Order:
    """A request that takes some seconds."""

    def __init__(self, site: FaultySite) -> None:
        self._site = site
        self._made: list[int] = []
        self._thread = threading.Thread(target=self._ask)

    def begin(self) -> None:
        """Return when tokens are generated."""
        before = _generated(self._site)
        self._thread.start()
        while _generated(self._site) == before:
            time.sleep(0.01)

    def end(self) -> int:
        """Return how many tokens were made."""
        self._thread.join(60)
        return self._made[0]

    def _ask(self) -> None:
        status, answer = self._site.vllm.request("/v1/completions", _ORDER)
        self._made.append(answer["usage"]["completion_tokens"] if status == 200 else 0)


def _generated(site: FaultySite) -> float:
    """Return how many tokens vLLM has generated since it started."""
    _, text = site.vllm.request("/metrics")
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
    return sum(float(line.split()[-1]) for line in lines)


def _die_in_a_pause(site: FaultySite, end: str, order: _Order) -> int:
    """Kill the server, and another one in a pause that ends as told; return what is live."""
    live = site.server.wait_serving().live_version
    site.server.kill()
    address = f"unix:{site.vllm.engine_socket}"
    command = [sys.executable, "-c", _PAUSER, address, end, str(_LEASE_S), str(live)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as pauser:
        assert pauser.stdin is not None
        assert pauser.stdout is not None
        try:
            assert pauser.stdout.readline() == "connected\n"
            order.begin()
            pauser.stdin.write("pause\n")
            pauser.stdin.flush()
            assert pauser.stdout.readline() == "paused\n"
        finally:
            pauser.kill()
    return live


def test_a_pause_that_fences_answers_503_until_a_server_has_decided(site: FaultySite) -> None:
    order = _Order(site)
    live = _die_in_a_pause(site, "fence", order)
    time.sleep(_LEASE_S + 1)
    assert f"the pause of apply a1 ({live} to {live + 1}) timed out" in site.refusal()
    made = _generated(site)
    for _ in range(20):
        assert site.ask() == "503"
        time.sleep(0.1)
    assert _generated(site) == made, "tokens were generated behind the fence"
    site.server.start()
    assert site.recover() == site.content[live]
    status = site.server.stub.GetStatus(pb.GetStatusRequest(), timeout=5)
    assert status.models[0].live_version == live
    # What was under way when it was paused goes on where it stood.
    assert order.end() == 480
    assert _generated(site) > made


def test_a_pause_that_resumes_goes_on_without_a_server(site: FaultySite) -> None:
    order = _Order(site)
    live = _die_in_a_pause(site, "resume", order)
    time.sleep(_LEASE_S + 1)
    assert site.ask() == site.content[live]
    assert order.end() == 480
    site.server.start()
    assert site.recover() == site.content[live]


def test_a_second_server_is_refused_while_vllm_answers_and_the_first_one_applies(
    site: FaultySite,
) -> None:
    engine = f"--engine=unix:{site.vllm.engine_socket}"
    second = WeightSyncServer(site.root / "run2", site.root / "state2", flags=[engine])
    assert site.server.process is not None
    try:
        second.start()
        refused = ""
        while "name another engine here" not in refused:
            site.apply(site.push("b"))
            assert site.ask() == "b"
            refused = (
                second.stub.GetStatus(pb.GetStatusRequest(), timeout=5).models[0].engine.reason
            )
        assert f"pid {site.server.process.pid}, run_dir {site.server.run_dir}" in refused
    finally:
        second.kill()
    live = site.server.wait_serving().live_version
    assert site.ask() == site.content[live]
