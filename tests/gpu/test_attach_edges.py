"""Who can write the memory of a CUDA vLLM, after its server was killed and after it has left.

Needs a GPU, and a vLLM of 0.26 or newer built for it.
"""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING

import pytest

from tests.support.attached_site import AttachedTrainer, content_of, started, unlike
from weightsync.errors import Reason
from weightsync_client import ClientError, LiveCheck

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.attached_site import AttachedSite

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def site() -> Iterator[AttachedSite]:
    with started(server_flags=("--pause-lease-s", "5"), durable=True) as site:
        yield site


def _until(true: Callable[[], bool], what: str, seconds: float = 90.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"it did not happen: {what}"
        time.sleep(0.05)


def _fenced_for(site: AttachedSite) -> str:
    with site.client() as client:
        engine = client.status().models[0].engine
        return engine.reason if engine.state == "fenced" else ""


def _check_first(site: AttachedSite, answers: list[object]) -> None:
    """The version before is served, bit for bit, and a trainer may begin."""
    site.server.wait_serving()
    assert site.answers() == answers
    with site.client() as client, client.attach() as attached:
        assert unlike(attached, site.first) == []
        assert client.verify().verified
    assert site.violations() == {}


@pytest.mark.parametrize("ends", ["killed", "closed"])
def test_a_server_that_is_killed_in_a_block_serves_once_nobody_can_write(
    site: AttachedSite, ends: str
) -> None:
    site.server.wait_serving()
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        assert trainer.ask("write") == "written"
        site.server.kill()
        site.server.start()
        pid = str(trainer.process.pid)
        _until(lambda: pid in _fenced_for(site), "the process that could write is named")
        if ends == "killed":
            trainer.process.send_signal(signal.SIGKILL)
            trainer.process.wait()
        else:
            assert trainer.ask("close") == "closed"
            trainer.process.kill()
            trainer.process.wait()
        _check_first(site, before)


def test_a_frozen_trainer_keeps_the_next_server_from_serving(site: AttachedSite) -> None:
    site.server.wait_serving()
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        assert trainer.ask("write") == "written"
        trainer.process.send_signal(signal.SIGSTOP)
        site.server.kill()
        site.server.start()
        pid = str(trainer.process.pid)
        _until(lambda: pid in _fenced_for(site), "the frozen process is named")
        # Longer than its lease: waiting changes nothing.
        over = time.monotonic() + 6
        with site.client() as client:
            while time.monotonic() < over:
                assert not client.health("serving")
                time.sleep(0.1)
        _until(lambda: pid in _fenced_for(site), "it is named again")
        trainer.process.send_signal(signal.SIGKILL)
        trainer.process.wait()
        _check_first(site, before)


def test_a_write_after_close_is_the_writers_own_fault(site: AttachedSite) -> None:
    site.server.wait_serving()
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        assert trainer.ask("late") == "fault"
        assert site.answers() == before
    _check_first(site, before)


def test_a_second_job_is_refused_by_name_also_by_the_next_server(site: AttachedSite) -> None:
    site.server.wait_serving()
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        for restarts in (False, True):
            if restarts:
                site.server.kill()
                site.server.start()
                site.server.wait_serving()
            with site.client() as client:
                with pytest.raises(ClientError) as caught:
                    client.attach().__enter__()
                assert caught.value.reason is Reason.ENGINE_REFUSED
                assert str(trainer.process.pid) in caught.value.message
        trainer.process.kill()
        trainer.process.wait()
    with site.attached() as attached, attached.transaction() as transaction:
        for name, tensor in content_of(site.second).items():
            attached.write(name, tensor)
    assert transaction.report is not None
    assert site.answers() != before
    with site.client() as client:
        client.rollback()
    _check_first(site, before)


# What a trainer writes outside a transaction counts as a violation: last.
def test_a_stray_write_is_found_by_the_next_server_too(site: AttachedSite) -> None:
    site.server.wait_serving()
    before = site.answers()
    with AttachedTrainer.running(site) as trainer:
        site.server.kill()
        site.server.start()
        live = site.server.wait_serving().live_version
        with site.client() as client:
            passed = LiveCheck.PASSED
            _until(lambda: client.get_version(live).live_check is passed, "it was compared")
            assert trainer.ask("stray") == "written"
            assert site.answers() != before
            said = "outside a transaction; version"
            _until(lambda: said in site.server.log, "the write is found")
            _until(lambda: client.health("serving"), "it serves again")
        assert site.answers() == before
    assert site.violations() == {"never_mixed": 1}
