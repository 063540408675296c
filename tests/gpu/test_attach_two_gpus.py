"""A trainer in the memory of an engine that two GPUs share: halves, replicas, parts of processes.

Needs two GPUs that reach each other, and a vLLM of 0.26 or newer built for them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import torch

from benchmarks.servers import free_port
from tests.support.attached_site import AttachedSite, content_of, started, unlike
from weightsync.errors import Reason
from weightsync_client import ClientError, RefusedError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs"),
]

_HALVED = "model.layers.0.mlp.down_proj.weight"
_WHOLE = "model.norm.weight"


@pytest.fixture(scope="module")
def site() -> Iterator[AttachedSite]:
    with started(tp=2) as site:
        yield site


def test_halves_and_replicas_are_those_of_the_checkpoint(site: AttachedSite) -> None:
    with site.attached() as attached:
        assert unlike(attached, site.first) == []
        columns = attached.shape(_HALVED)[1]
        assert [box.offsets for box in attached.boxes[_HALVED]] == [(0, 0), (0, columns // 2)]
        for name in (_HALVED, _WHOLE):
            assert [box.view.device.index for box in attached.boxes[name]] == [0, 1]
        with torch.device("meta"):
            model = torch.nn.Module()
            model.register_parameter("weight", torch.nn.Parameter(torch.empty(2)))
        with pytest.raises(RefusedError, match="are not contiguous"):
            attached.load_into(model)


@pytest.mark.parametrize("device", [0, 1])
def test_tensors_of_one_gpu_are_served_by_both(site: AttachedSite, device: int) -> None:
    before = site.answers()
    with site.attached() as attached:
        own = {n: t.cuda(device) for n, t in content_of(site.second).items()}
        report = site.check_served(attached, own, attached.update(own, background=True))
        assert [rank.rank for rank in report.ranks] == ["0/0/0", "0/0/1"]
    assert site.answers() == before
    assert site.violations() == {}


def test_a_replica_that_differs_is_not_served(site: AttachedSite) -> None:
    before = site.answers()
    with site.attached() as attached:
        with pytest.raises(ClientError) as caught, attached.transaction():
            attached.boxes[_WHOLE][1].view.add_(1)
        assert caught.value.reason is Reason.APPLY_RESTORED
        assert _WHOLE in caught.value.message
        assert unlike(attached, site.first) == []
    assert site.answers() == before
    assert site.violations() == {}


def test_rows_of_two_processes_are_served_as_one(site: AttachedSite) -> None:
    before = site.answers()
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.support.joint_trainer"]
    processes = [
        subprocess.Popen(
            [*command, site.server.address, str(site.second)],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **common, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    versions = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    with site.client() as client, client.attach() as attached:
        assert versions == [str(attached.version)] * 2
        assert unlike(attached, site.second) == []
        assert site.answers() != before
        assert client.verify().verified
        client.rollback()
        assert site.answers() == before
    assert site.violations() == {}
