"""Two real vLLM engines of one host beside one server: no answer of the old version after the new.

Requests run on both all the while, and every answer names the version that made it.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.following import until
from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer, own_core
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, EngineState

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.battery,
    pytest.mark.timeout(900),
]

_NAMES = ("e0", "e1")
_VERSION = "x-weightsync-version"
#: Some steps, so that applies come in the middle of requests.
_TOKENS = 24


@dataclass(frozen=True)
class _Answer:
    """When an answer was asked for and was there, and the versions that made it."""

    began: float
    ended: float
    versions: tuple[int, ...]


class _Asker:
    """Asks one engine without a break, until `stop`."""

    def __init__(self, vllm: VllmServer) -> None:
        self._vllm = vllm
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        self.answers: list[_Answer] = []
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        body = {
            "model": "model", "prompt": "The quick", "max_tokens": _TOKENS, "ignore_eos": True,
        }  # fmt: skip
        while not self._over.is_set():
            began = time.monotonic()
            with self._vllm.ask("/v1/completions", body) as answer:
                names = answer.headers[_VERSION]
                json.loads(answer.read())
                if answer.status == 200:
                    versions = tuple(map(int, names.split(",")))
                    self.answers.append(_Answer(began, time.monotonic(), versions))


class _Host:
    """A server, the folder of its engines, two vLLMs and a second checkpoint to push."""

    def __init__(self, root: Path) -> None:
        self.base, self.other = (make_checkpoint(root / f"m{seed}", seed=seed) for seed in (1, 2))
        self.engines = root / "engines"
        self.engines.mkdir()
        flags = ["--engine=none", f"--engines={self.engines}", "--slots=3", "--fetchers=2"]
        self.server = WeightSyncServer(root / "run", root / "state", flags=flags)
        self.vllms = [self._vllm(root, number) for number in range(len(_NAMES))]

    def _vllm(self, root: Path, number: int) -> VllmServer:
        return VllmServer(
            self.base,
            root / _NAMES[number],
            variables={
                "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{self.engines}/{_NAMES[number]}.sock",
                "WEIGHTSYNC_SEGMENT_SOCKET": f"unix:{self.server.segment_socket}",
                "VLLM_CPU_OMP_THREADS_BIND": own_core(number),
            },
        )

    def start(self) -> None:
        self.server.start()
        for vllm in self.vllms:
            vllm.launch()
        for vllm in self.vllms:
            vllm.ready()

    def stop(self) -> None:
        for vllm in self.vllms:
            vllm.stop()
        self.server.stop()

    def all_serve(self, client: Client, version: int) -> None:
        def so() -> bool:
            (model,) = client.status().models
            states = {one.state for one in model.engines}
            return (
                [one.name for one in model.engines] == list(_NAMES)
                and states == {EngineState.SERVING}
                and {one.live_version for one in model.engines} == {version}
            )

        try:
            until(so, f"all serve version {version}", 120)
        except AssertionError as error:
            raise AssertionError(self.server.log[-4000:]) from error


@pytest.fixture(scope="module")
def host() -> Iterator[_Host]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    root = Path(tempfile.mkdtemp(prefix="wv"))
    made = _Host(root)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(root)


def test_no_engine_answers_with_the_old_version_after_another_did_with_the_new(
    host: _Host,
) -> None:
    with Client(host.server.address) as client:
        host.all_serve(client, 1)
        askers = [_Asker(vllm) for vllm in host.vllms]
        try:
            version = client.push(host.other).version
            _more(askers)
            applied = client.apply(version)
            assert [one.absent for one in applied.engines] == ["", ""]
            _more(askers)
            _check(askers, old=1, new=version)
            assert client.rollback().report.version == 1
            _more(askers)
            _check(askers, old=version, new=1)
        finally:
            for asker in askers:
                asker.stop()
        assert client.verify().verified


def _check(askers: list[_Asker], *, old: int, new: int) -> None:
    """Compare all answers, and forget them."""
    answers = [answer for asker in askers for answer in asker.answers]
    assert {version for answer in answers for version in answer.versions} == {old, new}
    first = min(answer.ended for answer in answers if new in answer.versions)
    assert not [one for one in answers if one.began > first and old in one.versions]
    for asker in askers:
        asker.answers.clear()


def _more(askers: list[_Asker]) -> None:
    """Return when each has more answers, the last of which was asked for from now on."""
    counts = [len(asker.answers) + 3 for asker in askers]

    def so() -> bool:
        return all(len(a.answers) >= count for a, count in zip(askers, counts, strict=True))

    until(so, "the engines answer")


def test_a_vllm_that_was_killed_joins_at_the_version_of_its_host(host: _Host) -> None:
    with Client(host.server.address) as client:
        version = client.push(host.base, metadata={"again": "1"}).version
        client.apply(version)
        host.all_serve(client, version)
        killed = host.vllms[1]
        assert killed.process is not None
        os.killpg(killed.process.pid, signal.SIGKILL)
        killed.process.wait()
        newest = client.push(host.other).version
        report = client.apply(newest)
        absent = {one.engine: bool(one.absent) for one in report.engines}
        assert absent.get("e0") is False
        assert absent.get("e1", True) is True
        killed.launch().ready()
        host.all_serve(client, newest)
        with killed.ask("/v1/completions", {"model": "model", "prompt": "a"}) as answer:
            assert answer.headers[_VERSION] == str(newest)
