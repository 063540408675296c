"""The server is killed at each step of a transaction; the engine outlives it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.support.bounds import within
from tests.support.in_place_trainers import busy_trainer, older_trainer, stray_trainer
from tests.support.memory_bridge import memory_bridge
from tests.support.weightsync_server import WeightSyncServer
from weightsync.engine import VERSION_LOADS
from weightsync.errors import Reason, WeightSyncError
from weightsync.testing import MemoryEngine
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import Client, ClientError, LiveCheck, UnavailableError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from weightsync_client.attach import Attached

pytestmark = pytest.mark.timeout(120)

_SIZE = 1 << 16

#: Runs a server that compares what ranks hold every second while somebody has their memory.
_WATCHFUL = """
import runpy, sys
from weightsync_server.engine import live_check
live_check.CHECK_S = 1.0
sys.argv = sys.argv[3:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


def _weight(seed: int) -> torch.Tensor:
    return torch.arange(_SIZE, dtype=torch.float32) + seed


class _Site:
    """A server with an engine that outlives it.

    Attributes:
        engine: In this process.
        first: The version that a test begins with, the newest; its content is `_weight(1)`.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.plan = folder / "plan"
        self.plan.write_text("")
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=["--slots", "3", *flags],
            variables={"WEIGHTSYNC_FAILPOINTS": f"@{self.plan}"},
        )
        self.engine: Any = None

    @property
    def contents(self) -> list[torch.Tensor]:
        """What each rank holds."""
        return [
            torch.frombuffer(bytearray(rank.live["weight"]), dtype=torch.float32)
            for rank in self.engine.ranks
        ]

    def begin(self) -> None:
        """Have a version live as it was at first, whatever a test has left."""
        self.plan.write_text("")
        process = self.server.process
        if process is None or process.poll() is not None:
            self.server.kill()
            self.server.start()
        self.server.wait_serving()
        with Client(self.server.address) as client:
            self.first = client.push({"weight": _weight(1)}).version
            client.apply(self.first)

    def recover(self) -> int:
        """Return what is served, proved, by a new server in which nothing fails."""
        self.plan.write_text("")
        self.server.kill()
        self.server.start()
        live = self.server.wait_serving().live_version
        stub = self.server.stub
        assert stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=20).verified
        status = stub.GetStatus(pb.GetStatusRequest(), timeout=5)
        assert sum(status.invariant_violations.values()) == 0, self.server.log
        return live


class _VllmsEngine(MemoryEngine):
    """As vLLM's: it offers the files that it was started with, and could start loaders.

    Attributes:
        asked: The methods that its ranks were asked for.
    """

    def __init__(self, *facts: Any, **options: Any) -> None:
        super().__init__(*facts, **options)
        self._abilities.add(VERSION_LOADS)
        self._files = MemoryEngine(*facts)
        self.asked: list[str] = []

    async def offer_checkpoint(self, segment_socket: str, offer_id: str) -> list[str]:
        return await self._files.offer_checkpoint(segment_socket, offer_id)

    async def call_workers(self, method: str, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        self.asked.append(method)
        return await super().call_workers(method, args)


@contextlib.contextmanager
def _started(kind: type[MemoryEngine], *flags: str) -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wik") as name:
        folder = Path(name)
        (folder / "run").mkdir()
        site = _Site(folder, *flags)
        checkpoint = {"weight": ("F32", (_SIZE,), _weight(1).numpy().tobytes())}
        made = partial(kind, ranks=2, attachable=True)
        with memory_bridge(folder / "run", checkpoint, made) as site.engine:
            try:
                yield site
            finally:
                site.server.kill()


@pytest.fixture(scope="module")
def shared_site() -> Iterator[_Site]:
    with _started(MemoryEngine) as site:
        yield site


@pytest.fixture
def site(shared_site: _Site) -> _Site:
    shared_site.begin()
    return shared_site


@pytest.fixture
def watchful_site(shared_site: _Site) -> Iterator[_Site]:
    shared_site.server.kill()
    shared_site.server.wrapper = (sys.executable, "-c", _WATCHFUL)
    shared_site.begin()
    yield shared_site
    shared_site.server.kill()
    shared_site.server.wrapper = ()


@pytest.mark.parametrize(
    ("point", "counts"),
    [
        ("in_place.begin", False),
        ("in_place.begun", False),
        ("in_place.commit", False),
        ("in_place.resume", False),
        ("in_place.live", False),
        ("in_place.copied", False),
        ("in_place.restore", False),
        ("in_place.proved", False),
        ("commit.store", False),
        ("commit.reply", True),
        ("apply.done", True),
    ],
)
def test_one_whole_version_is_served(site: _Site, point: str, *, counts: bool) -> None:
    site.plan.write_text(f"{point}=1*panic")
    with Client(site.server.address) as client, client.attach() as attached:
        with contextlib.suppress(ClientError, ZeroDivisionError), attached.transaction():
            for box in attached.boxes["weight"]:
                box.view.add_(10)
            if point == "in_place.restore":
                _ = 1 / 0
        process = site.server.process
        assert process is not None
        process.wait(60)
    assert site.recover() == site.first + counts
    for content in site.contents:
        assert torch.equal(content, _weight(11 if counts else 1))


def test_what_was_never_proved_is_not_the_newest_of_the_next_server(site: _Site) -> None:
    """What was pushed is not what was written, which nobody has seen yet."""
    site.plan.write_text("in_place.copied=1*panic")
    with Client(site.server.address) as client, client.attach() as attached:
        push, told = attached._writing.push, []

        def other(_: object, **options: Any) -> object:
            told.append(options)
            return push({"weight": _weight(99)}, **options)

        object.__setattr__(attached._writing, "push", other)
        with pytest.raises(ClientError):
            _add(attached)
    assert site.recover() == site.first
    with Client(site.server.address) as client:
        committed = [one.version for one in client.versions() if one.content_digest]
        assert committed[0] == site.first
        # As a controller does all the time.
        assert client.apply().version == site.first
        for content in site.contents:
            assert torch.equal(content, _weight(1))
        # Nor is its push gone on with, whose bytes the store keeps: nobody would prove it.
        with pytest.raises(ClientError) as caught:
            client.push({"weight": _weight(99)}, **told[0])
        assert caught.value.reason is Reason.VERSION_NOT_ABOVE
        # Its number was served under, and is never another content's.
        assert client.push({"weight": _weight(1)}).version == site.first + 2


def test_a_server_that_is_killed_while_it_is_written(site: _Site) -> None:
    with (
        Client(site.server.address) as client,
        client.attach() as attached,
        contextlib.suppress(ClientError),
        attached.transaction(),
    ):
        attached.boxes["weight"][0].view[:100].fill_(-1)
        site.server.kill()
    assert site.recover() == site.first
    for content in site.contents:
        assert torch.equal(content, _weight(1))


def test_a_trainer_that_writes_on_writes_nothing_that_is_served(site: _Site) -> None:
    """The server is killed in its block."""
    with busy_trainer(site.server.address) as (trainer, end):
        site.server.kill()
        assert site.recover() == site.first
        # It has let go of what is live, or the engine would be fenced.
        for content in site.contents:
            assert torch.equal(content, _weight(1))
        assert end.poll(60)
        assert end.recv() in {Reason.SERVER_AWAY.value, Reason.CANCELLED.value}
        trainer.join(30)
        assert trainer.exitcode == 0


@pytest.mark.parametrize("ends", [signal.SIGKILL, signal.SIGCONT], ids=lambda ends: ends.name)
def test_a_frozen_trainer_keeps_the_next_server_from_serving(
    site: _Site, ends: signal.Signals
) -> None:
    with busy_trainer(site.server.address) as (trainer, _):
        assert trainer.pid is not None
        os.kill(trainer.pid, signal.SIGSTOP)
        site.server.kill()
        site.server.start()
        with Client(site.server.address) as client:

            def why() -> str:
                engine = client.status().models[0].engine
                return engine.reason if engine.state == "fenced" else ""

            # This process is named, too, where it has attached before: the ranks are in it.
            named = re.compile(rf"end process ([0-9]+, )*{trainer.pid}(, [0-9]+)*, or continue it")
            within(60, lambda: named.search(why()) is not None)
            os.kill(trainer.pid, ends)
        assert site.recover() == site.first
        for content in site.contents:
            assert torch.equal(content, _weight(1))


def test_ranks_remember_who_has_their_memory(site: _Site) -> None:
    """Over restarts of the server, and each process once."""

    def holders() -> list[list[int]]:
        return [rank.live.writers.state()["holders"] for rank in site.engine.ranks]

    with Client(site.server.address) as client, contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(client.attach())
        assert holders() == [[os.getpid()]] * 2
        site.recover()
    assert holders() == [[os.getpid()]] * 2
    with busy_trainer(site.server.address) as (trainer, _):
        assert holders() == [sorted([os.getpid(), trainer.pid or 0])] * 2
    assert holders() == [[os.getpid()]] * 2
    assert site.recover() == site.first


def test_a_second_job_is_kept_out_by_the_next_server_too(site: _Site) -> None:
    with older_trainer(site.server.address) as trainer:
        assert site.recover() == site.first
        with Client(site.server.address) as client:
            with pytest.raises(ClientError, match=f"end process {trainer.pid}, then") as caught:
                client.attach().__enter__()
            assert caught.value.reason is Reason.ENGINE_REFUSED
            trainer.kill()
            trainer.join()
            with client.attach() as attached:
                _add(attached)
    for content in site.contents:
        assert torch.equal(content, _weight(11))


@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ("nothing", "wrote weight outside a transaction"),
        ("session", "wrote weight outside a transaction"),
        ("server", "it shares no memory"),
    ],
)
def test_a_stray_write_is_found_whatever_was_lost(
    watchful_site: _Site, monkeypatch: pytest.MonkeyPatch, lost: str, told: str
) -> None:
    site = watchful_site
    with stray_trainer(site.server.address) as tell:
        if lost == "session":
            with Client(site.server.address) as client, monkeypatch.context() as patch:
                patch.setattr(site.engine, "health", _no_answer)
                within(30, lambda: client.status().models[0].engine.state == "away")
        elif lost == "server":
            site.server.kill()
            site.server.start()
        site.server.wait_serving()
        with Client(site.server.address) as client:
            # What follows an attach, or a start, is over.
            within(30, lambda: client.get_version(site.first).live_check is LiveCheck.PASSED)
            logged = len(site.server.log)
            assert tell("write") == "written"
            said = "wrote weight outside a transaction; version"
            within(30, lambda: f"{said} {site.first} is being restored" in site.server.log[logged:])
            within(30, lambda: client.get_version(site.first).live_check is LiveCheck.PASSED)
            for content in site.contents:
                assert torch.equal(content, _weight(1))
            assert client.status().invariant_violations["never_mixed"] == 1
            assert client.verify().verified
        assert told in tell("check")
    # What was counted goes with the server.
    assert site.recover() == site.first


async def _no_answer(newest: int | None = None) -> None:
    del newest
    raise WeightSyncError(Reason.ENGINE_AWAY, "as if vLLM did not answer")


def _add(attached: Attached, meanwhile: Callable[[], object] = int) -> None:
    with attached.transaction():
        for box in attached.boxes["weight"]:
            box.view.add_(10)
        meanwhile()


@pytest.mark.parametrize("phase", ["open", "live", "pushed"])
def test_an_engine_that_restarts_serves_one_whole_version(site: _Site, phase: str) -> None:
    checkpoint = {"weight": _weight(1).numpy().tobytes()}
    with Client(site.server.address) as client, client.attach() as attached:
        push = attached._writing.push

        def restart() -> None:
            site.engine.restart(checkpoint)

        def pushed(*content: Any, **options: Any) -> object:
            if phase == "live":
                restart()
            result = push(*content, **options)
            if phase == "pushed":
                restart()
            return result

        object.__setattr__(attached._writing, "push", pushed)
        # What is pushed is proved, and committed, so that the next engine is given it.
        counts = phase == "pushed"
        with contextlib.nullcontext() if counts else pytest.raises(ClientError):
            _add(attached, restart if phase == "open" else int)
        # The server may learn of it after the trainer.
        within(60, lambda: _is_gone(attached))
        live = site.server.wait_serving().live_version
    assert site.recover() == live == site.first + counts
    for content in site.contents:
        assert torch.equal(content, _weight(11 if counts else 1))


def _is_gone(attached: Attached) -> bool:
    """Return whether a trainer is told that the engine was started anew."""
    try:
        attached.check()
    except UnavailableError as error:
        return "attach again" in error.message
    return False


@pytest.mark.parametrize("word", ["_unprove", "_digest", "_verify"])
def test_a_rank_that_fails_at_a_step_is_put_back(site: _Site, word: str) -> None:
    failing = site.engine.ranks[1]
    works = getattr(failing, word)

    def fail(args: dict[str, Any]) -> dict[str, Any]:
        # The server compares by itself what is live, too: that is not the transaction's.
        if word != "_unprove" and not (failing._dirty or failing._digests):
            told: dict[str, Any] = works(args)
            return told
        delattr(failing, word)
        raise OSError("as if the rank had no memory")

    with Client(site.server.address) as client, client.attach() as attached:
        # What follows an attach is over.
        within(30, lambda: client.get_version(site.first).live_check is LiveCheck.PASSED)
        setattr(failing, word, fail)
        with pytest.raises(ClientError) as caught:
            _add(attached)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert "rank 0/0/1" in caught.value.message
        versions = client.versions()
        kept = {one.version: one.serving for one in versions if one.version >= site.first}
        assert kept == {site.first: "live"}
        attached.check()
        _add(attached)
    assert site.recover() == site.first + (1 if word == "_unprove" else 2)
    for content in site.contents:
        assert torch.equal(content, _weight(11))


def test_a_server_that_forgets_versions_starts_no_loader_and_lets_attach() -> None:
    """What ranks say was written is not taken for what vLLM computes of its checkpoint."""
    with _started(_VllmsEngine, "--store=memory://") as site:
        site.begin()
        with Client(site.server.address) as client:
            client.apply(client.push({"weight": _weight(5)}).version)
        for seed in (7, 8):
            site.recover()
            for content in site.contents:
                assert torch.equal(content, _weight(1))
            with Client(site.server.address) as client, client.attach() as attached:
                assert torch.equal(attached.read("weight"), _weight(1))
                _add(attached)
                client.apply(client.push({"weight": _weight(seed)}).version)
            for content in site.contents:
                assert torch.equal(content, _weight(seed))
        assert "weightsync_prepare" in site.engine.asked
        assert "weightsync_load" not in site.engine.asked
        assert "beside generation" not in site.server.log
