"""Trainers that attach to the parameters of a real server's engine."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import save_file

from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import (
    Client,
    DeniedError,
    InvalidError,
    LiveCheck,
    RefusedError,
    UnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.timeout(120)

_START_S = 60.0


def _tensors(seed: int) -> dict[str, torch.Tensor]:
    return {
        "w": torch.arange(32).reshape(8, 4).to(torch.bfloat16) + seed,
        "b": torch.zeros(3) + seed,
        "one": torch.tensor(seed, dtype=torch.int64),
    }


class _Site:
    """A server with an engine for tests, and sockets for roles."""

    def __init__(self, folder: Path, ranks: int) -> None:
        save_file(_tensors(1), folder / "model.safetensors")
        listen = [f"unix:{folder}/run/server.sock"]
        listen += [f"unix:{folder}/{role}.sock?role={role}" for role in ("train", "push")]
        flags = [f"--listen={address}" for address in listen]
        self.folder = folder
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[
                *("--engine", "memory", "--model", f"{folder}/model.safetensors"),
                *("--ranks", str(ranks), "--slots", "3", *flags),
            ],
        )

    def start(self) -> None:
        self.server.start()
        self.server.wait_serving(_START_S)

    def client(self, socket: str = "") -> Client:
        return Client(f"unix:{self.folder}/{socket}.sock" if socket else self.server.address)

    def log_says(self, text: str) -> bool:
        return text in self.server.log

    def stop(self) -> None:
        self.server.stop()


@contextlib.contextmanager
def _site(ranks: int) -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wsa") as name:
        site = _Site(Path(name), ranks)
        try:
            site.start()
            yield site
        finally:
            site.stop()


@pytest.fixture(scope="module")
def site() -> Iterator[_Site]:
    with _site(1) as made:
        yield made


def _until(true: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.05)


def _checked(client: Client, version: int) -> bool:
    return client.get_version(version).live_check is LiveCheck.PASSED


def test_views_are_what_the_engine_serves(site: _Site) -> None:
    with site.client() as client, site.client("train").attach() as attached:
        (live,) = {model.live_version for model in client.status().models}
        assert attached.version == live
        assert attached.content_digest == client.get_version(live).content_digest
        assert set(attached) == {"w", "b", "one"}
        content = {tensor.name: tensor.torch() for tensor in client.tensors()}
        for name, view in attached.items():
            assert torch.equal(view, content[name])
        # What others make live is seen through the same views.
        version = client.push(_tensors(5)).version
        client.apply(version)
        for name, expected in _tensors(5).items():
            assert torch.equal(attached[name], expected)
        attached.check()


@pytest.fixture
def always_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attach as an older release does, with memory that can always be written, as a GPU's can."""
    monkeypatch.setattr("weightsync_client.attach.trainer_job", str)


@pytest.mark.usefixtures("always_written")
def test_a_write_outside_a_transaction_is_named_and_undone(site: _Site) -> None:
    with site.client() as client:
        version = client.push(_tensors(6)).version
        client.apply(version)
        writer = site.client("train").attach()
        _until(lambda: _checked(client, version))
        writer["w"][2, 1] = 99
        # Whoever attaches has everything compared at once.
        with site.client("train").attach():
            _until(lambda: site.log_says("wrote w outside a transaction"))
            _until(lambda: bool(torch.equal(writer["w"], _tensors(6)["w"])))
            with pytest.raises(RefusedError, match="wrote w outside a transaction"):
                writer.check()
        writer.close()
        _until(lambda: _checked(client, version))
        assert client.verify().verified


@pytest.mark.usefixtures("always_written")
def test_what_is_written_at_last_is_found_too(site: _Site) -> None:
    with site.client() as client:
        version = client.push(_tensors(7)).version
        client.apply(version)
        attached = site.client("train").attach()
        _until(lambda: _checked(client, version))
        attached["b"].fill_(-1)
        attached.close()
        _until(lambda: site.log_says("wrote b outside a transaction"))
        _until(lambda: _seen(site, "b", _tensors(7)["b"]))
        _until(lambda: _checked(client, version))


def _seen(site: _Site, name: str, wanted: torch.Tensor) -> bool:
    """Whether who attaches now sees these values; nobody can while the engine is restored."""
    try:
        with site.client("train").attach() as attached:
            return bool(torch.equal(attached[name], wanted))
    except UnavailableError:
        return False


@pytest.mark.parametrize("socket", ["push"])
def test_other_roles_get_nothing(site: _Site, socket: str) -> None:
    with site.client(socket) as client, pytest.raises(DeniedError, match="train"):
        client.attach()


def test_an_unknown_engine_is_refused(site: _Site) -> None:
    with site.client("train") as client, pytest.raises(InvalidError, match="no engine 'other'"):
        client.attach("other")


_TRAINER = """
import sys, time
from weightsync_client import Client
attached = Client(sys.argv[1]).attach()
print(attached.version, flush=True)
time.sleep(600)
"""


def test_a_trainer_that_is_killed_is_attached_no_more(site: _Site) -> None:
    address = f"unix:{site.folder}/train.sock"
    trainer = subprocess.Popen([sys.executable, "-c", _TRAINER, address], stdout=subprocess.PIPE)
    try:
        assert trainer.stdout is not None
        assert trainer.stdout.readline().strip().isdigit()
        assert site.log_says(f"process {trainer.pid} has the memory of engine")
        assert not site.log_says(f"process {trainer.pid} has left engine")
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
    _until(lambda: site.log_says(f"process {trainer.pid} has left engine"))
    with site.client("train").attach() as attached:
        attached.check()


def test_replicas_are_written_on_every_rank() -> None:
    with _site(2) as site, site.client("train").attach() as attached:
        assert not list(attached)
        assert [(box.rank, box.offsets) for box in attached.boxes["w"]] == [
            ("0/0/0", (0, 0)),
            ("0/0/1", (0, 0)),
        ]
        with pytest.raises(KeyError, match="is in 2 places"):
            attached["w"]
        with attached.transaction():
            attached.write("w", _tensors(3)["w"])
            with pytest.raises(InvalidError, match="has shape"):
                attached.write("w", torch.zeros(2))
        for box in attached.boxes["w"]:
            assert torch.equal(box.view, _tensors(3)["w"])
        assert torch.equal(attached.read("w"), _tensors(3)["w"])
