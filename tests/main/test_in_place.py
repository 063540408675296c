"""Transactions of trainers that write an engine's live parameters, and what ends them."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import secrets
import signal
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.in_place_trainers import joint_update, stopped_trainer
from tests.support.late_writers import WAYS, late_writer, second_job
from tests.support.scraped import scraped
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import (
    ApplyKind,
    ApplyResult,
    Client,
    ClientError,
    InvalidError,
    LiveCheck,
    Probes,
    ShardedTensor,
)
from weightsync_client.attach.transaction import TransactionCall
from weightsync_client.rpc import calls

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from weightsync_client.attach import Attached
    from weightsync_client.attach.joint_update import WrittenBox

pytestmark = pytest.mark.timeout(120)

_START_S = 60.0
_RANKS = 2


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(32.0).reshape(8, 4) + seed, "b": torch.zeros(3) + seed}


class _Site:
    """A server with an engine of two ranks for tests, and a trainer that is attached.

    Attributes:
        first: The version that a test begins with, the newest; its content is `_tensors(1)`.
    """

    def __init__(self, folder: Path, *flags: str) -> None:
        self.plan = folder / "plan"
        self.plan.write_text("")
        save_file(_tensors(1), folder / "model.safetensors")
        self.address = f"unix:{folder}/train.sock"
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[
                *("--engine", "memory", "--model", f"{folder}/model.safetensors"),
                *("--ranks", str(_RANKS), "--slots", "3"),
                f"--listen=unix:{folder}/run/server.sock",
                f"--listen={self.address}?role=train",
                *flags,
            ],
            variables={"WEIGHTSYNC_FAILPOINTS": f"@{self.plan}"},
        )

    def begin(self) -> None:
        """Have a version live as it was at first, and nothing fail, whatever a test has left."""
        self._start()
        with self.client() as client:
            self.first = client.push(_tensors(1)).version
            client.apply(self.first)
        self._logged = len(self.server.log)

    @property
    def log(self) -> str:
        """What the server has printed since the test began."""
        return self.server.log[self._logged :]

    def wait_restored(self) -> None:
        """Return when what a trainer has written is taken back."""
        _until(lambda: f"version {self.first} is being restored" in self.log)

    def client(self) -> Client:
        return Client(self.server.address)

    @contextlib.contextmanager
    def attached(self) -> Iterator[Attached]:
        with Client(self.address) as client, client.attach() as attached:
            yield attached

    @contextlib.contextmanager
    def unguarded(self) -> Iterator[Attached]:
        """Attach as an older release does, with memory that can be written at any time.

        So can that of a GPU.
        """
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("weightsync_client.attach.trainer_job", str)
            with self.attached() as attached:
                yield attached

    def recover(self) -> int:
        """Return what is served, proved, when nothing fails any more."""
        live = self._start()
        with self.client() as client:
            assert client.verify().verified
            assert not any(client.status().invariant_violations.values())
            _until(lambda: _held(client) == {live})
        return live

    def _start(self) -> int:
        """Return what is served when nothing fails any more."""
        self.plan.write_text("")
        process = self.server.process
        if process is None or process.poll() is not None:
            self.server.kill()
            self.server.start()
        return self.server.wait_serving(_START_S).live_version


def _held(client: Client) -> set[int]:
    """Return the versions whose slots nothing else may come into."""
    (model,) = client.status().models
    return {slot.version for slot in model.slots if slot.leases}


@pytest.fixture(scope="module")
def shared_site() -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        site = _Site(Path(name))
        try:
            yield site
        finally:
            site.server.kill()


@pytest.fixture
def site(shared_site: _Site) -> _Site:
    shared_site.begin()
    return shared_site


def _add(attached: Attached, number: float) -> None:
    for name in attached.boxes:
        attached.write(name, attached.read(name) + number)


def _fail_in(attached: Attached, meanwhile: Callable[[str], None] = print) -> None:
    with attached.transaction() as transaction:
        _add(attached, 10)
        meanwhile(transaction.id)
        _ = 1 / 0


def _until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _refused(
    attached: Attached, reason: Reason, work: Callable[[], object] = int, **options: Any
) -> str:
    """Return why a transaction that writes and does some work did not count."""

    def write() -> None:
        with attached.transaction(**options):
            _add(attached, 1)
            work()

    with pytest.raises(ClientError) as caught:
        write()
    assert caught.value.reason is reason
    return caught.value.message


def test_what_was_written_is_a_version_like_any_other(site: _Site) -> None:
    metric = partial(scraped, site.server.log)
    committed = metric("weightsync_in_place_total", outcome="committed")
    restored = metric("weightsync_in_place_total", outcome="restored")
    with site.client() as client, site.attached() as attached:
        for number in (site.first + 1, site.first + 2):
            with attached.transaction() as transaction:
                (model,) = client.status().models
                assert model.engines[0].apply_id == transaction.id
                assert model.engine.state == "applying"
                _add(attached, 10)
            assert transaction.report is not None
            assert attached.version == transaction.report.version == number
            assert [rank.rank for rank in transaction.report.ranks] == ["0/0/0", "0/0/1"]
        content = {tensor.name: tensor.torch() for tensor in client.tensors()}
        for name, first in _tensors(1).items():
            assert torch.equal(content[name], first + 20)
        assert client.verify().verified
        assert metric("weightsync_attached_trainers") == 1
        assert metric("weightsync_in_place_total", outcome="committed") == committed + 2
        assert metric("weightsync_in_place_total", outcome="restored") == restored
        line = f'"method": "WriteInPlace", "model": "default", "version": {site.first + 2}, '
        _until(lambda: line in site.log)
        last = client.applies(1)[0]
        assert (last.kind, last.result) == (ApplyKind.IN_PLACE, ApplyResult.APPLIED)
        assert (last.previous_version, last.version) == (site.first + 1, site.first + 2)
        assert last.apply_id == transaction.id
        assert last.phases is not None
        assert last.phases.paused_total_s > 0
        client.rollback()
        assert torch.equal(attached.read("b"), _tensors(1)["b"] + 10)
        attached.check()
    assert site.recover() == site.first + 1


def test_what_was_written_survives_the_server(site: _Site) -> None:
    with site.attached() as attached, attached.transaction():
        _add(attached, 10)
    site.server.kill()
    site.server.start()
    # The engine for tests lives in the server, and starts on its checkpoint.
    assert site.recover() == site.first + 1


def test_an_error_in_the_block_takes_it_back(site: _Site) -> None:
    metric = partial(scraped, site.server.log, "weightsync_in_place_total")
    restored = metric(outcome="restored")
    with site.attached() as attached:
        with pytest.raises(ZeroDivisionError):
            _fail_in(attached)
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        assert attached.version == site.first
        with attached.transaction():
            _add(attached, 10)
        assert metric(outcome="restored") == restored + 1
    with site.client() as client:
        kept, taken_back = (one for one in client.applies(2))
    assert (kept.result, taken_back.result) == (ApplyResult.APPLIED, ApplyResult.RESTORED)
    assert (taken_back.previous_version, taken_back.engine) == (site.first, "memory")
    assert "the trainer withdrew it" in taken_back.reason
    assert site.recover() == site.first + 1


def test_what_was_computed_on_another_version_is_refused(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        client.apply(client.push(_tensors(5)).version)
        message = _refused(attached, Reason.VERSION_CONFLICT)
        assert f"version {site.first + 1} is live" in message
        assert torch.equal(attached.read("b"), _tensors(5)["b"])
    assert site.recover() == site.first + 1


def test_in_a_fleet_nobody_else_decides() -> None:
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        folder = Path(name)
        site = _Site(folder, "--fleet=f", f"--fleet-register={(folder / 'register').as_uri()}")
        try:
            site.server.start()
            site.server.wait_serving(_START_S)
            with site.attached() as attached:
                message = _refused(attached, Reason.NOT_SUPPORTED)
                assert "a member of fleet f" in message
                assert torch.equal(attached.read("b"), _tensors(1)["b"])
        finally:
            site.server.kill()


def test_an_apply_waits_for_the_end(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        version = client.push(_tensors(5)).version
        applying = threading.Thread(target=client.apply, args=[version])

        def meanwhile(transaction_id: str) -> None:
            applying.start()
            time.sleep(0.5)
            (model,) = client.status().models
            assert (model.live_version, model.engines[0].apply_id) == (site.first, transaction_id)

        with pytest.raises(ZeroDivisionError):
            _fail_in(attached, meanwhile)
        applying.join()
        assert torch.equal(attached.read("b"), _tensors(5)["b"])
    assert site.recover() == version


def test_a_rollback_ends_a_block(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        client.apply(client.push(_tensors(5)).version)
        attached.version = site.first + 1
        # It waits for no trainer.
        message = _refused(attached, Reason.APPLY_RESTORED, client.rollback, lease_s=600.0)
        assert "a rollback was asked for" in message
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == site.first


def test_the_pause_ends_by_the_setting_however_often_it_is_renewed() -> None:
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        site = _Site(Path(name), "--in-place-pause-s=1")
        try:
            site.begin()
            with site.attached() as attached:

                def renew() -> None:
                    # It raises when the server has ended the block.
                    _until(attached._transaction.renew)  # type: ignore[union-attr]

                message = _refused(attached, Reason.APPLY_RESTORED, renew, lease_s=20.0)
                assert "has been paused for 1 s, the limit of --in-place-pause-s" in message
                assert site.server.wait_serving().live_version == site.first
                assert torch.equal(attached.read("b"), _tensors(1)["b"])
                attached.check()
                with attached.transaction():
                    _add(attached, 10)
            assert site.recover() == site.first + 1
        finally:
            site.server.kill()


def test_a_rollback_ends_a_block_also_where_there_is_no_way_back() -> None:
    """However long the trainer may write: nobody who has the role apply has to wait for it."""
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        site = _Site(Path(name))
        try:
            site.server.start()
            live = site.server.wait_serving(_START_S).live_version
            with site.client() as client, site.attached() as attached:

                def roll_back() -> None:
                    with pytest.raises(ClientError) as caught:
                        client.rollback()
                    assert caught.value.reason is Reason.NO_ROLLBACK

                message = _refused(attached, Reason.APPLY_RESTORED, roll_back, lease_s=600.0)
                assert "a rollback was asked for" in message
                assert torch.equal(attached.read("b"), _tensors(1)["b"])
            assert site.recover() == live
        finally:
            site.server.kill()


def test_a_rollback_ends_a_transaction_that_has_not_begun_to_write(site: _Site) -> None:
    """While the ranks are unproved; the trainer is given nothing to write with any more."""
    with site.client() as client, site.attached() as attached:
        client.apply(client.push(_tensors(5)).version)
        attached.version = site.first + 1
        site.plan.write_text("in_place.begun=1*sleep(1)")
        rollback = threading.Timer(0.5, client.rollback)
        rollback.start()
        message = _refused(attached, Reason.APPLY_RESTORED, lambda: pytest.fail("it may not write"))
        assert "a rollback was asked for" in message
        rollback.join()
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == site.first


def _begins(attached: Attached) -> TransactionCall:
    """Return a call that waits for the engine, whose answer nobody awaits yet."""
    call = attached.transaction().call
    threading.Thread(target=_ignoring, args=[call.begin, attached.version], daemon=True).start()
    _until(lambda: call._call is not None)
    return call


def _ignoring(call: Callable[..., object], *args: object) -> None:
    with contextlib.suppress(ClientError):
        call(*args)


def test_what_came_to_nothing_while_it_waited_pauses_nothing(site: _Site) -> None:
    """Of a trainer that waits for others and gives up, or before whose turn a rollback comes."""
    with site.client() as client, site.attached() as attached:
        client.apply(client.push(_tensors(5)).version)
        attached.version = site.first + 1

        def wait() -> None:
            given_up = _begins(attached)
            left = _begins(attached)
            time.sleep(0.5)
            given_up._call.cancel()
            time.sleep(0.5)
            client.rollback()
            with pytest.raises(ClientError, match="nothing was started or paused") as caught:
                left._answer()
            assert caught.value.reason is Reason.APPLY_BUSY

        assert "a rollback was asked for" in _refused(attached, Reason.APPLY_RESTORED, wait)
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        assert site.log.count("is being restored: ") == 1
    assert site.recover() == site.first


def test_a_rollback_does_not_wait_for_a_push(site: _Site) -> None:
    """That hangs, while a thread renews the lease; it leaves what is not pushed, and no more."""
    with site.client() as client, site.attached() as attached:
        client.apply(client.push(_tensors(5)).version)
        attached.version = site.first + 1
        key, answers = secrets.token_hex(8), []

        def roll_back() -> None:
            answers.append(client.rollback(idempotency_key=key))

        with _pushing(attached, roll_back):
            _refused(attached, Reason.VERSION_NOT_ABOVE, lease_s=0.6)
        assert torch.equal(attached.read("b"), _tensors(5)["b"])
        # Its answer may have been lost.
        roll_back()
    site.server.kill()
    site.server.start()
    site.server.wait_serving(_START_S)
    with site.client() as client:
        roll_back()
        assert {answer.report.version for answer in answers} == {site.first + 1}
        assert {answer.rejected_version for answer in answers} == {0}
        assert client.status().models[0].live_version == site.first + 1
        assert client.rollback().report.version == site.first
    assert site.recover() == site.first


def test_a_transaction_is_that_of_an_attachment(site: _Site) -> None:
    with site.attached() as attached:
        transaction = attached.transaction()
        for name in ("", "another"):
            transaction.call._begin.attachment = name
            with pytest.raises(ClientError, match="attach before you begin") as caught:
                transaction.begin()
            assert caught.value.reason is Reason.ENGINE_REFUSED
            transaction = attached.transaction()
    assert site.recover() == site.first


def test_a_server_that_was_short_of_descriptors_serves_again() -> None:
    """It keeps nothing open by which the memory can be written."""
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        site = _Site(Path(name))
        try:
            site.begin()
            with site.attached() as attached:
                take = attached.open_block

                def short(transaction: str) -> None:
                    # It takes two of each rank, for its gate and its memory.
                    with _descriptors_left(site.server, 2):
                        take(transaction)

                attached.open_block = short  # type: ignore[method-assign]
                with (
                    pytest.raises(ClientError, match="raise the limit on open files"),
                    attached.transaction(),
                ):
                    pytest.fail("it may not be written")
                attached.open_block = take  # type: ignore[method-assign]
                with attached.transaction():
                    _add(attached, 10)
            assert site.recover() == site.first + 1
        finally:
            site.server.kill()


@contextlib.contextmanager
def _descriptors_left(server: WeightSyncServer, count: int) -> Iterator[None]:
    assert server.process is not None
    pid = server.process.pid
    used = {int(fd.name) for fd in Path(f"/proc/{pid}/fd").iterdir()}
    limit = next(at for at in range(1 << 20) if at - sum(fd < at for fd in used) == count)
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    # What is open above it stays open.
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


#: vLLM that drains for a while in a pause of mode `wait`.
_DRAINS = """
import asyncio
from weightsync.testing.memory_engine import MemoryEngine
_pause = MemoryEngine.pause
async def pause(self, spec, lease_s):
    if spec.mode == "wait":
        await asyncio.sleep(3)
    return await _pause(self, spec, lease_s)
MemoryEngine.pause = pause
"""


def test_nothing_is_written_while_the_engine_still_generates() -> None:
    """By a process of the same job that knows the transaction by GetStatus."""
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        site = _Site(Path(name))
        patch = Path(name) / "patch"
        patch.mkdir()
        (patch / "sitecustomize.py").write_text(_DRAINS)
        path = f"{patch}:{os.environ.get('PYTHONPATH', '')}"
        site.server.variables = {**site.server.variables, "PYTHONPATH": path}
        try:
            site.begin()
            with site.client() as client, site.attached() as attached:
                transaction = attached.transaction(pause="wait")
                beginning = threading.Thread(target=transaction.begin)
                beginning.start()
                _until(lambda: client.status().models[0].engines[0].apply_id)
                # It hands out nothing before INTENT, which comes at once.
                time.sleep(0.5)
                begun = client.status().models[0].engines[0].apply_id
                with pytest.raises(ClientError, match=f"transaction {begun} is not open"):
                    attached.open_block(begun)
                assert not transaction.id, "it was not asked in time"
                beginning.join()
                attached.write("b", _tensors(5)["b"])
                transaction.abort()
                assert torch.equal(attached.read("b"), _tensors(1)["b"])
            assert site.recover() == site.first
        finally:
            site.server.kill()


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lease_s": 0.01}, "lease must be"),
        ({"lease_s": 1000.0}, "lease must be"),
        ({"pause": "between_steps"}, "the engine is paused while it is written"),
    ],
)
def test_bad_input_is_refused_and_nothing_pauses(
    site: _Site, options: dict[str, Any], sentence: str
) -> None:
    with site.attached() as attached:
        with pytest.raises(InvalidError, match=sentence), attached.transaction(**options):
            pytest.fail("it may not be written")
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == site.first


def test_a_silent_trainer_loses_its_lease(site: _Site) -> None:
    with site.attached() as attached:
        message = _refused(attached, Reason.APPLY_RESTORED, site.wait_restored, lease_s=1.0)
        assert "sent no heartbeat for 1 s" in message
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == site.first


def test_one_that_says_that_it_works_keeps_it(site: _Site) -> None:
    with site.attached() as attached, attached.transaction(lease_s=2.0) as transaction:
        for _ in range(12):
            time.sleep(0.2)
            transaction.renew()
        _add(attached, 10)
    assert site.recover() == site.first + 1


@contextlib.contextmanager
def _pushing(
    attached: Attached, before: Callable[[], object] = int, after: Callable[[], object] = int
) -> Iterator[None]:
    """Have something done before and after a transaction's push; the engine generates by then."""
    push = attached._writing.push

    def pushed(content: dict[str, torch.Tensor], **options: Any) -> object:
        before()
        result = push(content, **options)
        after()
        return result

    object.__setattr__(attached._writing, "push", pushed)
    yield
    object.__setattr__(attached._writing, "push", push)


def test_the_engine_generates_before_it_is_pushed(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        seen = []

        def look() -> None:
            (model,) = client.status().models
            newest = client.versions()[0]
            seen.append((model.engines[0].live_version, newest.version, newest.residency))
            assert (newest.serving, newest.durability) == ("live", "receiving")
            assert newest.content_digest == ""
            with pytest.raises(ClientError, match="what a trainer writes in place") as caught:
                client.push(_tensors(7), version=newest.version)
            assert caught.value.reason is Reason.PUSH_ABORTED
            with pytest.raises(ClientError, match="in an engine's memory alone") as caught:
                next(iter(client.tensors(newest.version)))
            assert caught.value.reason is Reason.PUSH_INCOMPLETE
            time.sleep(0.5)

        begin = time.monotonic()
        with _pushing(attached, look), attached.transaction() as transaction:
            _add(attached, 10)
        taken_s = time.monotonic() - begin
        assert seen == [(site.first + 1, site.first + 1, "device")]
        assert transaction.report is not None
        assert transaction.report.phases.paused_total_s == pytest.approx(transaction.paused_s)
        # What the push took is no part of it.
        assert transaction.paused_s < taken_s - 0.5
        newest = client.versions()[0]
        assert (newest.residency, newest.durability) == ("staged", "committed")
        assert client.push(_tensors(7)).version == site.first + 2
    assert site.recover() == site.first + 1


def test_nobody_takes_what_is_not_proved_yet(site: _Site) -> None:
    """What is pushed is not what was written; followers and controllers look all the time."""
    site.plan.write_text("in_place.copied=1*sleep(2)")
    with site.client() as client, site.attached() as attached:
        wanted, seen = _tensors(5), []

        def look_on() -> None:
            wanted["b"].add_(1)
            watching.start()

        def look() -> None:
            while "is being restored: " not in site.log:
                newest = client.versions()[0]
                if newest.version > site.first:
                    seen.append(newest.durability)
                # The server answers a caller 500 times a second.
                time.sleep(0.005)

        watching = threading.Thread(target=look)
        with (
            _pushing(attached, look_on),
            pytest.raises(ClientError, match="holds something else of b") as caught,
        ):
            attached.update(wanted)
        watching.join()
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert "receiving" in seen
        assert "committed" not in seen
        assert client.apply().version == site.first
    assert site.recover() == site.first


@pytest.mark.parametrize("keyed", [True, False])
def test_only_the_trainer_brings_what_it_has_written(site: _Site, *, keyed: bool) -> None:
    """Others, who may push too, know the name of its transaction by GetStatus.

    By that name a trainer of an older release pushes, so that another caller may not.
    """
    refused = []
    with Client(site.address if keyed else site.server.address) as other, site.attached() as mine:

        def push() -> None:
            (model,) = other.status().models
            options: Any = {"idempotency_key": model.engines[0].apply_id}
            with pytest.raises(ClientError, match="what a trainer writes in place") as caught:
                other.push(_tensors(7), version=site.first + 1, **options)
            refused.append(caught.value.reason)

        with _pushing(mine, push):
            transaction = mine.transaction()
            transaction.call._begin.keyed = keyed
            with transaction:
                _add(mine, 10)
        assert (transaction.call.push_key == transaction.id) is not keyed
        assert transaction.report is not None
        assert torch.equal(mine.read("b"), _tensors(1)["b"] + 10)
    assert refused == [Reason.PUSH_ABORTED]
    assert site.recover() == site.first + 1


def test_it_is_pushed_in_the_background(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        may_push = threading.Event()
        with _pushing(attached, lambda: may_push.wait(30)):
            with attached.transaction(background=True) as first:
                _add(attached, 10)
            assert first.report is None
            assert client.versions()[0].residency == "device"
            assert client.status().models[0].live_version == site.first + 1
            may_push.set()
            # Begins when that has ended, on what came of it.
            with attached.transaction() as second:
                _add(attached, 10)
        assert (first.report, second.report) != (None, None)
        newest = [one.version for one in client.versions()][:3]
        assert newest == [site.first + 2, site.first + 1, site.first]
        assert torch.equal(attached.read("b"), _tensors(1)["b"] + 20)
    assert site.recover() == site.first + 2


@pytest.mark.parametrize("asked", [True, False])
def test_what_fails_in_the_background_is_raised_once(site: _Site, *, asked: bool) -> None:
    """By `result`, or else by the next transaction."""
    with site.unguarded() as attached:
        failed = pytest.raises(ClientError, match="holds something else of b")
        with _pushing(attached, after=lambda: _write_b(attached, 1)):
            with attached.transaction(background=True) as first:
                _add(attached, 10)
            if asked:
                with failed:
                    first.result()
            else:
                with failed, attached.transaction():
                    pytest.fail("it may not be written")
        assert first.result() is None
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        with attached.transaction(background=True):
            _add(attached, 10)
    assert site.recover() == site.first + 2


def test_a_trainer_has_one_transaction_at_a_time(site: _Site) -> None:
    with site.attached() as attached:
        with attached.transaction():
            _add(attached, 10)
            inner = attached.transaction()
            with pytest.raises(InvalidError, match="is open; begin one when"), inner:
                pytest.fail("it may not be written")
        assert attached.version == site.first + 1
    assert site.recover() == site.first + 1


def test_one_that_was_refused_in_a_block_leaves_that_to_be_waited_for(site: _Site) -> None:
    with site.attached() as attached:
        may_push = threading.Event()
        with _pushing(attached, lambda: may_push.wait(30)):
            with attached.transaction(background=True) as first:
                _add(attached, 10)
                with pytest.raises(InvalidError, match="is open; begin one when"):
                    attached.transaction().begin()
            # As closing does: what is unmapped then must not be read any more.
            waiting = threading.Thread(target=attached.settle_transaction)
            waiting.start()
            time.sleep(0.5)
            assert waiting.is_alive()
            may_push.set()
            waiting.join()
        assert first.report is not None
    assert site.recover() == site.first + 1


def test_what_was_closed_says_so(site: _Site) -> None:
    with site.attached() as attached:
        pass
    for use in (attached.check, attached.transaction().begin):
        with pytest.raises(InvalidError, match="attach again: this attachment was closed"):
            use()
    assert site.recover() == site.first


def test_a_lease_that_is_over_is_not_renewed(site: _Site) -> None:
    with site.attached() as attached:

        def late() -> None:
            site.wait_restored()
            # The trainer's end of the stream learns of it a little later.
            _until(transaction.renew)

        transaction = attached.transaction(lease_s=1.0)
        with pytest.raises(ClientError, match="sent no heartbeat for 1 s"), transaction:
            late()
    assert site.recover() == site.first


@pytest.mark.parametrize("background", [False, True])
def test_a_trainer_has_its_own_tensors_served(site: _Site, *, background: bool) -> None:
    with site.client() as client, site.attached() as attached:
        wanted = {name: tensor + 0.1 for name, tensor in _tensors(5).items()}
        done = attached.update(wanted, background=background)
        assert client.status().models[0].live_version == site.first + 1
        assert torch.equal(attached.read("w"), wanted["w"])
        report = done.result()
        assert report is not None
        content = {tensor.name: tensor.torch() for tensor in client.tensors(report.version)}
        assert all(torch.equal(content[name], wanted[name]) for name in wanted)
        client.rollback()
        assert torch.equal(attached.read("w"), _tensors(1)["w"])
    assert site.recover() == site.first


def test_probes_are_sent_with_what_was_written(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[pb.CommitPushRequest] = []
    real = calls.commit_push

    def commit_push(request: pb.CommitPushRequest, timeouts: Any) -> Any:
        found.append(request)
        return real(request, timeouts)

    monkeypatch.setattr(calls, "commit_push", commit_push)
    probes = Probes([[1, 2]], [[-0.5]])
    with site.client() as client, site.attached() as attached:
        attached.update(_tensors(5), background=True, probes=probes).result()
        with attached.transaction(probes=probes):
            _add(attached, 1)
        with attached.transaction():
            _add(attached, 1)
        with pytest.raises(InvalidError, match="probes is 7; use Probes"):
            attached.update(_tensors(6), probes=7)  # type: ignore[arg-type]
        assert [one.HasField("probes") for one in found] == [True, True, False]
        assert [one.probes for one in found[:2]] == [probes.to_message()] * 2
        for _ in found:
            client.rollback()
    assert site.recover() == site.first


def test_what_a_trainer_overwrites_too_early_is_found(site: _Site) -> None:
    with site.attached() as attached:
        wanted = _tensors(5)
        with (
            _pushing(attached, lambda: wanted["b"].add_(1)),
            pytest.raises(ClientError, match="holds something else of b") as caught,
        ):
            attached.update(wanted)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == site.first


def test_what_changes_while_it_is_copied_is_never_served(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    with site.attached() as attached:
        wanted, check = _tensors(5), attached.check_written

        def after_a_change(places: Iterable[WrittenBox]) -> None:
            wanted["b"][1] = 0.5
            check(places)

        monkeypatch.setattr(attached, "check_written", after_a_change)
        with pytest.raises(ClientError, match=r"^b \(of 1\) changed while") as caught:
            attached.update(wanted)
        assert caught.value.reason is Reason.DIGEST_MISMATCH
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        assert f"version {site.first + 1} is live" not in site.log
    assert site.recover() == site.first


def test_a_tied_tensor_is_left_out_of_an_update(site: _Site) -> None:
    with site.attached() as attached:
        wanted = _tensors(5)
        attached.update(wanted | {"head": wanted["w"]})
        assert torch.equal(attached.read("w"), wanted["w"])
        with pytest.raises(InvalidError, match="checkpoint: head"):
            attached.update(wanted | {"head": wanted["w"].clone()})
    assert site.recover() == site.first + 1


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (None, "takes tensors by name, not NoneType"),
        ([("b", torch.zeros(3))], "takes tensors by name, not list"),
        ({"w": [1.0]}, "w is not a dense PyTorch tensor"),
        ({"w": torch.zeros(8, 4, device="meta")}, "w is not a dense PyTorch tensor"),
        ({"w": torch.zeros(8, 4).to_sparse()}, "w is not a dense PyTorch tensor"),
        ({"w": ShardedTensor((8, 4), "F32", [])}, "call init_process_group first"),
    ],
)
def test_what_is_no_tensor_is_refused(site: _Site, tensors: Any, why: str) -> None:
    with site.attached() as attached, pytest.raises(InvalidError, match=why):
        attached.update(tensors)
    assert site.recover() == site.first


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda tensors: tensors.pop("b"), "b"),
        (lambda tensors: tensors.update(c=torch.zeros(1)), "c"),
        (lambda tensors: tensors.update(w=torch.zeros(4, 8)), "w"),
        (lambda tensors: tensors.update(w=tensors["w"].bfloat16()), "w"),
    ],
)
def test_an_update_is_all_that_the_engine_has(
    site: _Site, change: Callable[[dict[str, torch.Tensor]], object], named: str
) -> None:
    with site.attached() as attached:
        tensors = _tensors(5)
        change(tensors)
        with pytest.raises(InvalidError, match=rf"checkpoint: {named} \(of {named} it has"):
            attached.update(tensors)
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == site.first


def _joint(site: _Site, folder: Path, how: str) -> list[str]:
    """Return what two processes tell that have parts of tensors served."""
    return joint_update(site.address, folder, _tensors(5), how)


@pytest.mark.parametrize(("how", "count"), [("shards", 1), ("replica", 1), ("background", 2)])
def test_processes_that_have_parts_have_them_served_together(
    site: _Site, tmp_path: Path, how: str, count: int
) -> None:
    version = site.first + count
    assert _joint(site, tmp_path, how) == [f"version {version} {version}"] * 2
    with site.client() as client, site.attached() as attached:
        for name, first in _tensors(1).items():
            assert torch.equal(attached.read(name), first + 4)
        content = {tensor.name: tensor.torch() for tensor in client.tensors(version)}
        for name, first in _tensors(1).items():
            assert torch.equal(content[name], first + 4)
    assert site.recover() == version


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("missing", "tensors are missing, unknown to the engine, or of a different dtype or shape"),
        ("fails", "ZeroDivisionError: division by zero"),
        ("changes", "w (of 1) changed while they were copied into the engine"),
    ],
)
def test_what_fails_in_one_process_fails_in_all(
    site: _Site, tmp_path: Path, how: str, why: str
) -> None:
    first, second = _joint(site, tmp_path, how)
    assert why in first
    assert why.rsplit(": ", 1)[-1] in second
    with site.attached() as attached:
        assert torch.equal(attached.read("w"), _tensors(1)["w"])
    assert site.recover() == site.first


def test_a_process_that_dies_takes_the_update_with_it(site: _Site, tmp_path: Path) -> None:
    first, second = _joint(site, tmp_path, "dies")
    assert "a rank of the trainer has exited" in first
    assert "restart the processes and attach again" in first
    assert second == ""
    with site.attached() as attached:
        assert torch.equal(attached.read("w"), _tensors(1)["w"])
    assert site.recover() == site.first


def _write_b(attached: Attached, rank: int) -> None:
    attached.boxes["b"][rank].view[1] = -1


@pytest.mark.parametrize("rank", range(_RANKS))
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_written_once_it_was_live_is_found(site: _Site, rank: int, when: str) -> None:
    """Also where it was pushed as it is."""
    with site.unguarded() as attached:
        ranks = range(_RANKS) if when == "before" else [rank]

        def lie() -> None:
            for each in ranks:
                _write_b(attached, each)

        with _pushing(attached, **{when: lie}):
            message = _refused(attached, Reason.APPLY_RESTORED)
        assert "holds something else of b" in message
        with site.client() as client:
            assert client.versions()[0].version == site.first
        for box in attached.boxes["b"]:
            assert torch.equal(box.view, _tensors(1)["b"])
    assert site.recover() == site.first


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_push_that_fails_leaves_nothing(site: _Site, when: str) -> None:
    with site.client() as client, site.attached() as attached:

        def fail() -> None:
            raise ZeroDivisionError

        with (
            _pushing(attached, **{when: fail}),
            pytest.raises(ZeroDivisionError),
            attached.transaction(),
        ):
            _add(attached, 10)
        assert attached.version == site.first
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        # Nobody takes it for the newest.
        assert client.versions()[0].version == site.first
        # Its number was served under, and is never another content's.
        with attached.transaction():
            _add(attached, 10)
        assert attached.version == site.first + 2
    assert site.recover() == site.first + 2


def test_a_trainer_that_is_silent_once_it_is_live_loses_its_lease(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        gone = attached._writing.push

        def wait(*_: object, **__: object) -> None:
            site.wait_restored()
            # Too late.
            gone({name: attached.read(name) for name in attached.boxes}, **__)

        object.__setattr__(attached._writing, "push", wait)
        with _unrenewed():
            message = _refused(attached, Reason.VERSION_NOT_ABOVE, lease_s=1.0)
        assert f"version {site.first + 1}" in message
        assert client.versions()[0].version == site.first
    assert site.recover() == site.first


@contextlib.contextmanager
def _unrenewed() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransactionCall, "_renew", lambda _: None)
        yield


def test_a_replica_that_was_not_written_is_found(site: _Site) -> None:
    with site.attached() as attached:
        message = _refused(
            attached, Reason.APPLY_RESTORED, lambda: attached.boxes["w"][0].view.add_(1)
        )
        assert "ranks 0/0/0 and 0/0/1 hold different bytes of the same part of w" in message
    assert site.recover() == site.first


@pytest.mark.parametrize("phase", ["open", "live"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=lambda end: end.name)
def test_a_trainer_that_dies_or_freezes_is_put_back(
    site: _Site, end: signal.Signals, phase: str
) -> None:
    lease_s = 60.0 if end is signal.SIGKILL else 1.0
    with stopped_trainer(site.address, lease_s, phase) as trainer:
        assert trainer.pid is not None
        os.kill(trainer.pid, end)
        site.wait_restored()
        if (end, phase) == (signal.SIGSTOP, "open"):
            # Whatever it writes when it goes on is not served.
            _until(lambda: f"end process {trainer.pid}, or continue it" in site.log)
            with site.client() as client:
                _until(lambda: client.status().models[0].engine.state == "fenced")
            os.kill(trainer.pid, signal.SIGCONT)
        assert site.recover() == site.first
        with site.attached() as attached:
            assert torch.equal(attached.read("w"), _tensors(1)["w"])


@pytest.mark.parametrize(
    "point",
    [
        "in_place.begin",
        "in_place.begun",
        "in_place.commit",
        "in_place.resume",
        "in_place.live",
        "in_place.copied",
        "in_place.proved",
        "in_place.restore",
    ],
)
def test_the_server_fails_at_each_step(site: _Site, point: str) -> None:
    site.plan.write_text(f"{point}=1*error(EIO)")
    with site.attached() as attached:
        with contextlib.suppress(ClientError), attached.transaction():
            _add(attached, 10)
            if point == "in_place.restore":
                raise ClientError(Reason.FAULT, "as if")
        assert site.recover() == site.first
        assert torch.equal(attached.read("b"), _tensors(1)["b"])


@pytest.mark.parametrize("way", sorted(WAYS))
def test_a_late_write_is_the_writer_s_own_end(site: _Site, way: str) -> None:
    """What was written in the block is served, or what was before it, and nothing else."""
    assert late_writer(site.address, way) == -signal.SIGSEGV
    served = site.recover()
    with site.attached() as attached:
        for name, first in _tensors(1).items():
            assert torch.equal(attached.read(name), first + (served - site.first))
    # A thread that writes all the time ends its trainer before that has pushed.
    assert served == site.first + (way != "thread")


def test_a_block_alone_lets_write(site: _Site) -> None:
    with site.attached() as attached:
        with pytest.raises(InvalidError, match="write w inside `with attached"):
            attached.write("w", _tensors(5)["w"])
        attached.close()
        for use in (lambda: attached.read("w"), lambda: attached.write("w", _tensors(5)["w"])):
            with pytest.raises(InvalidError, match="attach again: this attachment was closed"):
                use()
    assert site.recover() == site.first


def test_one_job_writes_an_engine(site: _Site, monkeypatch: pytest.MonkeyPatch) -> None:
    with site.attached() as first:
        with first.transaction():
            _add(first, 10)
        monkeypatch.setattr("weightsync_client.attach.trainer_job", lambda: "another")
        with site.attached() as second:
            message = _refused(second, Reason.ENGINE_REFUSED)
            assert f"end process {os.getpid()} or close its attachment" in message
            assert torch.equal(second.read("b"), _tensors(1)["b"] + 10)
            first.close()
            _until(lambda: site.log.count("has left engine"))
            with second.transaction():
                _add(second, 10)
    assert site.recover() == site.first + 2


@pytest.mark.parametrize("jobs", [("", "another"), ("another", "")])
def test_memory_that_can_always_be_written_is_one_job_s(
    site: _Site, monkeypatch: pytest.MonkeyPatch, jobs: tuple[str, str]
) -> None:
    """As that of a GPU."""
    each = iter(jobs)
    monkeypatch.setattr("weightsync_client.attach.trainer_job", lambda: next(each))
    with site.attached():
        with pytest.raises(ClientError, match="only one job at a time may") as caught:
            site.attached().__enter__()
        assert caught.value.reason is Reason.ENGINE_REFUSED
    assert site.recover() == site.first


def test_what_was_written_before_the_block_is_no_part_of_it(site: _Site) -> None:
    with site.client() as client, site.unguarded() as attached:
        _until(lambda: client.get_version(site.first).live_check is LiveCheck.PASSED)
        _write_b(attached, 0)
        message = _refused(attached, Reason.APPLY_RESTORED)
        assert "holds something else of b than version" in message
        assert client.status().invariant_violations["never_mixed"] == 1
        assert torch.equal(attached.boxes["b"][0].view, _tensors(1)["b"])
    # What was counted goes with it.
    site.server.kill()
    assert site.recover() == site.first


@pytest.mark.parametrize(
    ("way", "comes_of_it"),
    [
        ("view", "SIGSEGV"),
        ("proc mem", "SIGSEGV"),
        ("own transaction", "only one job at a time may"),
        ("other's transaction", "only one job at a time may"),
    ],
)
def test_a_second_job_writes_nothing_in_the_block_of_the_first(
    site: _Site, way: str, comes_of_it: str
) -> None:
    with site.client() as client, second_job(site.address) as attempt, site.attached() as attached:
        with attached.transaction() as transaction:
            _add(attached, 10)
            assert comes_of_it in attempt(way, transaction.id)
        content = {tensor.name: tensor.torch() for tensor in client.tensors(site.first + 1)}
        for name, first in _tensors(1).items():
            assert torch.equal(content[name], first + 10)
            assert torch.equal(attached.read(name), first + 10)
    assert site.recover() == site.first + 1


@pytest.mark.battery
def test_what_a_second_job_opens_anew_in_the_block_of_the_first_is_never_served(
    site: _Site,
) -> None:
    """Nor is anything else, as long as it has that."""
    with site.attached() as attached:
        with second_job(site.address) as attempt:

            def harm() -> None:
                assert attached._transaction is not None
                assert attempt("descriptor", attached._transaction.id) == "written"

            message = _refused(attached, Reason.ENGINE_FENCED, harm)
            assert "it can still write the engine's memory" in message
            with site.client() as client:
                assert client.versions()[0].version == site.first
                _until(lambda: client.status().models[0].engine.state == "fenced")
        assert site.recover() == site.first
        assert torch.equal(attached.read("w"), _tensors(1)["w"])


def test_a_mapping_that_is_made_in_a_block_is_never_served(site: _Site) -> None:
    """Nor is anything else, as long as it is there."""
    with site.attached() as attached:
        view = attached.boxes["w"][0].view
        copies: list[int] = []
        message = _refused(
            attached, Reason.ENGINE_FENCED, lambda: copies.append(_mapped_again(view.data_ptr()))
        )
        assert "a mapping or descriptor that was opened in the block" in message
        assert f"end process {os.getpid()}" in message
        _libc.munmap(copies.pop(), mmap.PAGESIZE)
        assert site.recover() == site.first
        assert torch.equal(view, _tensors(1)["w"])


_libc = ctypes.CDLL(None)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAY_MOVE = 1


def _mapped_again(address: int) -> int:
    """Return where the page at an address lies once more, as mremap(2) has it from a size of 0."""
    page = address & -mmap.PAGESIZE
    return int(_libc.mremap(page, 0, mmap.PAGESIZE, _MAY_MOVE))
