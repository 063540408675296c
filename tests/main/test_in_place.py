"""Transactions of trainers that write an engine's live parameters, and what ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save_file

from tests.support.scraped import scraped
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync_client import Client, ClientError, InvalidError, ShardedTensor
from weightsync_client.attach.transaction_call import TransactionCall

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from weightsync_client.attach import Attached
    from weightsync_client.attach.written_boxes import WrittenBox

pytestmark = pytest.mark.timeout(120)

_START_S = 60.0
_RANKS = 2


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {"w": torch.arange(32.0).reshape(8, 4) + seed, "b": torch.zeros(3) + seed}


class _Site:
    """A server with an engine of two ranks for tests, and a trainer that is attached."""

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

    def client(self) -> Client:
        return Client(self.server.address)

    @contextlib.contextmanager
    def attached(self) -> Iterator[Attached]:
        with Client(self.address) as client, client.attach() as attached:
            yield attached

    def recover(self) -> int:
        """Return what is served, proved, when nothing fails any more."""
        self.plan.write_text("")
        process = self.server.process
        assert process is not None
        if process.poll() is not None:
            self.server.kill()
            self.server.start()
        live = self.server.wait_serving(_START_S).live_version
        with self.client() as client:
            assert client.verify().verified
            assert not any(client.status().invariant_violations.values())
        return live


@pytest.fixture
def site() -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsi") as name:
        site = _Site(Path(name))
        try:
            site.server.start()
            site.server.wait_serving(_START_S)
            yield site
        finally:
            site.server.kill()


def _add(attached: Attached, number: float) -> None:
    for name in attached.boxes:
        attached.write(name, attached.read(name) + number)


def _fail_in(attached: Attached, meanwhile: Callable[[str], None] = print) -> None:
    with attached.transaction() as transaction:
        _add(attached, 10)
        meanwhile(transaction.id)
        _ = 1 / 0


def _until(true: Callable[[], bool]) -> None:
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
    with site.client() as client, site.attached() as attached:
        for number in (2, 3):
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
        metric = partial(scraped, site.server.log)
        assert metric("weightsync_attached_trainers") == 1
        assert metric("weightsync_in_place_total", outcome="committed") == 2
        assert metric("weightsync_in_place_total", outcome="restored") == 0
        line = '"method": "WriteInPlace", "model": "default", "version": 3, '
        _until(lambda: line in site.server.log)
        client.rollback()
        assert torch.equal(attached.read("b"), _tensors(1)["b"] + 10)
        attached.check()
    assert site.recover() == 2


def test_what_was_written_survives_the_server(site: _Site) -> None:
    with site.attached() as attached, attached.transaction():
        _add(attached, 10)
    site.server.kill()
    site.server.start()
    # The engine for tests lives in the server, and starts on its checkpoint.
    assert site.recover() == 2


def test_an_error_in_the_block_takes_it_back(site: _Site) -> None:
    with site.attached() as attached:
        with pytest.raises(ZeroDivisionError):
            _fail_in(attached)
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        assert attached.version == 1
        with attached.transaction():
            _add(attached, 10)
        assert scraped(site.server.log, "weightsync_in_place_total", outcome="restored") == 1
    assert site.recover() == 2


def test_what_was_computed_on_another_version_is_refused(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        client.apply(client.push(_tensors(5)).version)
        message = _refused(attached, Reason.VERSION_CONFLICT)
        assert "version 2 is live" in message
        assert torch.equal(attached.read("b"), _tensors(5)["b"])
    assert site.recover() == 2


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
            assert (model.live_version, model.engines[0].apply_id) == (1, transaction_id)

        with pytest.raises(ZeroDivisionError):
            _fail_in(attached, meanwhile)
        applying.join()
        assert torch.equal(attached.read("b"), _tensors(5)["b"])
    assert site.recover() == version


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lease_s": 0.01}, "lease must be"),
        ({"lease_s": 1000.0}, "lease must be"),
        ({"pause": "between_steps"}, "stands still while it is written"),
    ],
)
def test_bad_input_is_refused_and_nothing_pauses(
    site: _Site, options: dict[str, Any], sentence: str
) -> None:
    with site.attached() as attached:
        with pytest.raises(InvalidError, match=sentence), attached.transaction(**options):
            pytest.fail("it may not be written")
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == 1


def test_a_silent_trainer_loses_its_lease(site: _Site) -> None:
    with site.attached() as attached:
        back = partial(_until, lambda: site.recover() == 1)
        message = _refused(attached, Reason.APPLY_RESTORED, back, lease_s=0.5)
        assert "silent for 0.5 s" in message
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
    assert site.recover() == 1


def test_one_that_says_that_it_works_keeps_it(site: _Site) -> None:
    with site.attached() as attached, attached.transaction(lease_s=1.0) as transaction:
        for _ in range(8):
            time.sleep(0.25)
            transaction.renew()
        _add(attached, 10)
    assert site.recover() == 2


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
            time.sleep(1)

        with _pushing(attached, look), attached.transaction() as transaction:
            _add(attached, 10)
        assert seen == [(2, 2, "device")]
        assert transaction.report is not None
        assert transaction.report.phases.paused_total_s == pytest.approx(transaction.paused_s)
        # What the push took is no part of it.
        assert transaction.paused_s < 1
        newest = client.versions()[0]
        assert (newest.residency, newest.durability) == ("staged", "committed")
        assert client.push(_tensors(7)).version == 3
    assert site.recover() == 2


def test_it_is_pushed_in_the_background(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        may_push = threading.Event()
        with _pushing(attached, lambda: may_push.wait(30)):
            with attached.transaction(background=True) as first:
                _add(attached, 10)
            assert first.report is None
            assert client.versions()[0].residency == "device"
            assert client.status().models[0].live_version == 2
            may_push.set()
            # Begins when that has ended, on what came of it.
            with attached.transaction() as second:
                _add(attached, 10)
        assert (first.report, second.report) != (None, None)
        assert [one.version for one in client.versions()] == [3, 2, 1]
        assert torch.equal(attached.read("b"), _tensors(1)["b"] + 20)
    assert site.recover() == 3


@pytest.mark.parametrize("asked", [True, False])
def test_what_fails_in_the_background_is_raised_once(site: _Site, *, asked: bool) -> None:
    """By `result`, or else by the next transaction."""
    with site.attached() as attached:
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
    assert site.recover() == 3


def test_a_trainer_has_one_transaction_at_a_time(site: _Site) -> None:
    with site.attached() as attached:
        with attached.transaction():
            _add(attached, 10)
            inner = attached.transaction()
            with pytest.raises(InvalidError, match="is open; begin one when"), inner:
                pytest.fail("it may not be written")
        assert attached.version == 2
    assert site.recover() == 2


def test_what_was_closed_says_so(site: _Site) -> None:
    with site.attached() as attached:
        pass
    for use in (attached.check, attached.transaction().begin):
        with pytest.raises(InvalidError, match="this was closed; attach again"):
            use()
    assert site.recover() == 1


def test_a_lease_that_is_over_is_not_renewed(site: _Site) -> None:
    with site.attached() as attached:

        def late() -> None:
            _until(lambda: "version 1 is put back" in site.server.log)
            time.sleep(0.5)
            transaction.renew()
            pytest.fail("it may not be written any more")

        transaction = attached.transaction(lease_s=0.5)
        with pytest.raises(ClientError, match=r"silent for 0\.5 s"), transaction:
            late()
    assert site.recover() == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_trainer_has_its_own_tensors_served(site: _Site, *, background: bool) -> None:
    with site.client() as client, site.attached() as attached:
        wanted = {name: tensor + 0.1 for name, tensor in _tensors(5).items()}
        done = attached.update(wanted, background=background)
        assert client.status().models[0].live_version == 2
        assert torch.equal(attached.read("w"), wanted["w"])
        report = done.result()
        assert report is not None
        content = {tensor.name: tensor.torch() for tensor in client.tensors(report.version)}
        assert all(torch.equal(content[name], wanted[name]) for name in wanted)
        client.rollback()
        assert torch.equal(attached.read("w"), _tensors(1)["w"])
    assert site.recover() == 1


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
    assert site.recover() == 1


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
        assert "version 2 is live" not in site.server.log
    assert site.recover() == 1


def test_a_tied_tensor_is_left_out_of_an_update(site: _Site) -> None:
    with site.attached() as attached:
        wanted = _tensors(5)
        attached.update(wanted | {"head": wanted["w"]})
        assert torch.equal(attached.read("w"), wanted["w"])
        with pytest.raises(InvalidError, match="checkpoint: head"):
            attached.update(wanted | {"head": wanted["w"].clone()})
    assert site.recover() == 2


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        (None, "takes tensors by name, not NoneType"),
        ([("b", torch.zeros(3))], "takes tensors by name, not list"),
        ({"w": [1.0]}, "w is no dense tensor"),
        ({"w": torch.zeros(8, 4, device="meta")}, "w is no dense tensor"),
        ({"w": torch.zeros(8, 4).to_sparse()}, "w is no dense tensor"),
        ({"w": ShardedTensor((8, 4), "F32", [])}, "call init_process_group first"),
    ],
)
def test_what_is_no_tensor_is_refused(site: _Site, tensors: Any, why: str) -> None:
    with site.attached() as attached, pytest.raises(InvalidError, match=why):
        attached.update(tensors)
    assert site.recover() == 1


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
    assert site.recover() == 1


_PROCESS = """
import os, sys
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from weightsync_client import Client, ClientError
distributed.init_process_group("gloo")
mesh = init_device_mesh("cpu", (2,))
whole = {"w": torch.arange(32.0).reshape(8, 4) + 5, "b": torch.zeros(3) + 5}
tensors = {name: distribute_tensor(one, mesh, [Shard(0)]) for name, one in whole.items()}
if sys.argv[2] == "replica":
    tensors["b"] = distribute_tensor(whole["b"], mesh, [Replicate()])
def change(places):
    if sys.argv[2] == "dies":
        os._exit(3)
    places[0].source.add_(1)
    type(attached).check_written(attached, places)
if sys.argv[2] == "missing" and distributed.get_rank() == 1:
    del tensors["b"]
with Client(sys.argv[1]).attach() as attached:
    if sys.argv[2] == "fails" and distributed.get_rank() == 1:
        attached.settle = lambda: 1 / 0
    if sys.argv[2] in ("changes", "dies") and distributed.get_rank() == 1:
        attached.check_written = change
    try:
        for again in range(2 if sys.argv[2] == "background" else 1):
            done = attached.update(tensors, background=sys.argv[2] == "background")
        done.result()
    except (ClientError, ZeroDivisionError, RuntimeError) as error:
        print(type(error).__name__, error)
    else:
        print("version", done.report.version, attached.version)
    if sys.argv[2] == "fails":
        attached.__class__.settle(attached)
        os._exit(0)
"""


def _joint(site: _Site, how: str) -> list[str]:
    """Return what two processes print that have parts of tensors served."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROCESS, site.address, how],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    return [process.communicate(timeout=90)[0].strip() for process in processes]


@pytest.mark.parametrize(("how", "version"), [("shards", 2), ("replica", 2), ("background", 3)])
def test_processes_that_have_parts_have_them_served_together(
    site: _Site, how: str, version: int
) -> None:
    assert _joint(site, how) == [f"version {version} {version}"] * 2
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
        ("missing", "tensors are missing, unknown to the engine, or of another dtype or shape"),
        ("fails", "ZeroDivisionError: division by zero"),
        ("changes", "w (of 1) changed while they were copied into the engine"),
    ],
)
def test_what_fails_in_one_process_fails_in_all(site: _Site, how: str, why: str) -> None:
    first, second = _joint(site, how)
    assert why in first
    assert why.rsplit(": ", 1)[-1] in second
    with site.attached() as attached:
        assert torch.equal(attached.read("w"), _tensors(1)["w"])
    assert site.recover() == 1


def test_a_process_that_dies_takes_the_update_with_it(site: _Site) -> None:
    first, second = _joint(site, "dies")
    assert "a rank of the trainer has gone" in first
    assert "start the processes anew and attach again" in first
    assert second == ""
    with site.attached() as attached:
        assert torch.equal(attached.read("w"), _tensors(1)["w"])
    assert site.recover() == 1


def _write_b(attached: Attached, rank: int) -> None:
    attached.boxes["b"][rank].view[1] = -1


@pytest.mark.parametrize("rank", range(_RANKS))
@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_written_once_it_was_live_is_found(site: _Site, rank: int, when: str) -> None:
    """Also where it was pushed as it is."""
    with site.attached() as attached:
        ranks = range(_RANKS) if when == "before" else [rank]

        def lie() -> None:
            for each in ranks:
                _write_b(attached, each)

        with _pushing(attached, **{when: lie}):
            message = _refused(attached, Reason.APPLY_RESTORED)
        assert "holds something else of b" in message
        with site.client() as client:
            assert [one.version for one in client.versions()] == [1]
        for box in attached.boxes["b"]:
            assert torch.equal(box.view, _tensors(1)["b"])
    assert site.recover() == 1


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
        assert attached.version == 1
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
        # Nobody takes it for the newest.
        assert [one.version for one in client.versions()] == [1]
        # Its number was served under, and is never another content's.
        with attached.transaction():
            _add(attached, 10)
        assert attached.version == 3
    assert site.recover() == 3


def test_a_trainer_that_is_silent_once_it_is_live_loses_its_lease(site: _Site) -> None:
    with site.client() as client, site.attached() as attached:
        gone = attached._writing.push

        def wait(*_: object, **__: object) -> None:
            _until(lambda: "version 1 is put back" in site.server.log)
            # Too late.
            gone({name: attached.read(name) for name in attached.boxes}, **__)

        object.__setattr__(attached._writing, "push", wait)
        with _unrenewed():
            message = _refused(attached, Reason.VERSION_NOT_ABOVE, lease_s=0.5)
        assert "version 2" in message
        assert [one.version for one in client.versions()] == [1]
    assert site.recover() == 1


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
        assert "ranks 0/0/0 and 0/0/1 hold other bytes of the same part of w" in message
    assert site.recover() == 1


_TRAINER = """
import sys, time
from weightsync_client import Client
attached = Client(sys.argv[1]).attach()
def stop(*_, **__):
    print("written", flush=True)
    time.sleep(600)
if sys.argv[3] == "live":
    object.__setattr__(attached._writing, "push", stop)
with attached.transaction(lease_s=float(sys.argv[2])) as transaction:
    for box in attached.boxes["w"]:
        box.view.fill_(-1)
    if sys.argv[3] == "open":
        stop()
"""


@pytest.mark.parametrize("phase", ["open", "live"])
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP], ids=lambda end: end.name)
def test_a_trainer_that_dies_or_freezes_is_put_back(
    site: _Site, end: signal.Signals, phase: str
) -> None:
    lease_s = "60" if end is signal.SIGKILL else "1"
    command = [sys.executable, "-c", _TRAINER, site.address, lease_s, phase]
    trainer = subprocess.Popen(command, stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"written\n"
        trainer.send_signal(end)
        _until(lambda: "version 1 is put back" in site.server.log)
        assert site.recover() == 1
        with site.attached() as attached:
            assert torch.equal(attached.read("w"), _tensors(1)["w"])
    finally:
        trainer.kill()
        trainer.communicate()


@pytest.mark.parametrize(
    ("point", "live"),
    [
        ("in_place.begin", {1}),
        ("in_place.begun", {1}),
        ("in_place.commit", {1}),
        ("in_place.resume", {1}),
        ("in_place.live", {1}),
        ("in_place.copied", {1}),
        ("in_place.proved", {1}),
        ("in_place.restore", {1}),
    ],
)
def test_the_server_fails_at_each_step(site: _Site, point: str, live: set[int]) -> None:
    site.plan.write_text(f"{point}=1*error(EIO)")
    with site.attached() as attached:
        with contextlib.suppress(ClientError), attached.transaction():
            _add(attached, 10)
            if point == "in_place.restore":
                raise ClientError(Reason.FAULT, "as if")
        assert site.recover() in live
        assert torch.equal(attached.read("b"), _tensors(1)["b"])
