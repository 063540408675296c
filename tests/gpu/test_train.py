"""A trainer that the server supervises, on the GPU of the vLLM that it trains.

Needs a GPU, and a vLLM of 0.26 or newer built for it.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.attached_site import AttachedSite, content_of, started
from weightsync_client import Client, TrainerState, TrainEvent

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

_TRAINER = "examples.serve_and_train:Tuner"
_TEXT = {"prompt": "hello", "completion": " world"}
_REQUEST = {"examples": [_TEXT], "steps": 4, "learning_rate": 1e-3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def site(folder: Path) -> Iterator[AttachedSite]:
    flags = ("--trainer", _TRAINER, "--checkpoint-dir", str(folder))
    with started(server_flags=flags) as site:
        yield site


def _ready(client: Client, not_pid: int = 0) -> int:
    """Return the trainer's process once it waits for jobs."""
    end = time.monotonic() + 120
    while True:
        status = client.train_status()
        if status.state is TrainerState.READY and status.pid != not_pid:
            return status.pid
        assert time.monotonic() < end, status
        time.sleep(0.1)


def test_it_learns_while_vllm_answers(site: AttachedSite, folder: Path) -> None:
    before = site.answers()
    with site.client() as client:
        pid = _ready(client)
        losses: list[float] = []
        for progress in client.train(_REQUEST):
            if progress.event is TrainEvent.STEP and progress.loss is not None:
                losses.append(progress.loss)
                assert site.answers()
        assert len(losses) == 4
        assert losses[-1] < losses[0]
        assert client.verify().verified
        after = site.answers()
        assert after != before
        client.checkpoint("learned")
        saved = content_of(folder / "learned")
        for pulled in client.tensors():
            assert pulled.torch().equal(saved[pulled.name]), pulled.name
        # Nothing of what it has on the GPU is the engine's only copy.
        os.kill(pid, signal.SIGKILL)
        assert site.answers() == after
        _ready(client, not_pid=pid)
        assert client.verify().verified
        more = [progress.loss for progress in client.train(_REQUEST | {"steps": 1})]
        assert min(loss for loss in more if loss is not None) < losses[0]
    assert site.violations() == {}
