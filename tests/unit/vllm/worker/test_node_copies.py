"""A rank on another node: it reads its own node's copies, and says to the head what that has."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from safetensors.torch import save

from tests.support.staging import Staging
from tests.unit.vllm.conftest import ToyModel, load_for_real, toy_tensors
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.node.v1 import node_pb2 as pb
from weightsync_server.replicate.node_server import StagedCopies

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator
    from pathlib import Path

    from tests.support.staging import Version


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Staging]:
    """The segment socket of another node."""
    node = Staging(tmp_path / "node.sock")
    yield node
    node.close()


def _copies(head: Staging, node: Staging) -> StagedCopies:
    async def read(request: pb.ReadStagedRequest) -> AsyncGenerator[pb.ReadStagedResponse, None]:
        (version,) = (one for one in head.versions if one.document.id == request.name)
        shard = request.shard if request.HasField("shard") else None
        segment = version.document if shard is None else version.segments[shard]
        yield pb.ReadStagedResponse(data=bytes(segment.view))

    return StagedCopies(node.server, read)


async def _stage(copies: StagedCopies, version: Version) -> None:
    digest = version.content_digest
    await copies.stage(pb.StageVersion(name=version.document.id, content_digest=digest))


async def test_a_rank_goes_by_its_own_node_and_names_versions_and_no_slots(
    staging: Staging, node: Staging
) -> None:
    first, second = (staging.stage_files([save(toy_tensors(seed))]) for seed in (1, 2))
    copies = _copies(staging, node)
    rank = Worker(load_for_real(ToyModel(), toy_tensors(1)), node)
    await _stage(copies, first)
    rank.adopt(first)
    await _stage(copies, second)
    assert rank.job("prepare", "two", second)["phase"] == "ready"
    reply = rank.call("commit", apply_id="two")
    assert reply["content_digest"] == second.content_digest
    # What it maps it tells by the head's names of the versions; of what the head has it keeps all.
    names = [first.document.id, second.document.id]
    assert rank.call("release", keep=["base", "two"], segments=names)["mapped"] == sorted(names)
    assert rank.call("release", keep=["two"], segments=names[1:])["mapped"] == names[1:]
    copies.close()
    # Its node's server is gone with all that it had: what is prepared is the rank's.
    assert rank.call("commit", apply_id="two")["ok"]


async def test_a_server_that_came_back_with_the_same_content_is_read_on(
    staging: Staging, node: Staging
) -> None:
    first = staging.stage_files([save(toy_tensors(1))])
    copies = _copies(staging, node)
    await _stage(copies, first)
    rank = Worker(load_for_real(ToyModel(), toy_tensors(1)), node)
    rank.adopt(first)
    assert rank.call("release", keep=[], segments=[])["mapped"] == []
    copies.close()
    again = _copies(staging, node)
    await _stage(again, first)
    assert rank.job("prepare", "one", first, compare_live=True)["proved"] is True
    again.close()


async def test_another_content_under_the_name_is_refused(staging: Staging, node: Staging) -> None:
    first = staging.stage_files([save(toy_tensors(1))])
    copies = _copies(staging, node)
    await _stage(copies, first)
    rank = Worker(load_for_real(ToyModel(), toy_tensors(1)), node)
    rank.adopt(first)
    report = rank.job("prepare", "two", first, content_digest="0" * 32)
    assert report["phase"] == "failed"
    assert "restart the weightsync-server of this node" in report["error"]
    copies.close()
