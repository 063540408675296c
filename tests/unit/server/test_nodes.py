"""Nodes that join, leave and take each other's place, as the head's worker calls see them."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import Layout, Manifest, ShardEntry
from weightsync.node.v1 import node_pb2 as pb
from weightsync.shm.segment_socket import SegmentServer
from weightsync.shm.segments import Segment
from weightsync.shm.staged_version import StagedVersion
from weightsync.shm.status_page import PageReader
from weightsync_server.nodes import EngineNodes, JoinedNode, NodeGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

_RANKS = ("0/0/0", "0/0/1", "0/1/0", "0/1/1")
_ENGINE = object()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SegmentServer]:
    server = SegmentServer(tmp_path / "s.sock")
    yield server
    server.close()


@pytest.fixture
async def group(server: SegmentServer) -> AsyncIterator[NodeGroup]:
    group = NodeGroup(server)
    yield group
    group.close()


def _nodes(group: NodeGroup, count: int = 2) -> EngineNodes:
    return EngineNodes(group, _ENGINE, count, _RANKS)


def _joined(group: NodeGroup, rank: int = 1) -> JoinedNode:
    node = JoinedNode(rank)
    group.join(node)
    return node


async def _asked(node: JoinedNode) -> Any:
    return await asyncio.wait_for(anext(aiter(node.requests())), 5)


def _ready(node: JoinedNode, name: str, error: str = "", reason: str = "") -> None:
    node.take(pb.NodeReady(name=name, error=error, reason=reason))


async def _has_pages(group: NodeGroup, node: JoinedNode, name: str) -> None:
    waiting = asyncio.ensure_future(_nodes(group).have({"page": name}, 5))
    assert (await _asked(node)).pages.name == name
    _ready(node, name)
    await waiting


async def _refusal(call: Any) -> WeightSyncError:
    with pytest.raises(WeightSyncError) as caught:
        await asyncio.wait_for(call, 5)
    return caught.value


async def test_an_engine_on_one_node_asks_nobody(group: NodeGroup) -> None:
    assert await _nodes(group, 1).have({"document": "d", "page": "p"}, 5) == 0
    assert _nodes(group, 1).changes == 0


async def test_a_call_that_needs_nothing_new_needs_no_server(group: NodeGroup) -> None:
    assert await _nodes(group).have({"apply_id": "a", "version": 3}, 5) == 0


async def test_each_node_is_asked_once_and_for_its_own_ranks(
    group: NodeGroup, server: SegmentServer
) -> None:
    segment = Segment.create(10)
    server.publish("d", segment.read_only_fd(), 10)
    node, nodes = _joined(group), _nodes(group)
    args = {"document": "d", "content_digest": "c", "page": "p"}
    waiting = asyncio.ensure_future(nodes.have(args, 5))
    stage, pages = await _asked(node), await _asked(node)
    assert (stage.stage.name, stage.stage.content_digest) == ("d", "c")
    assert list(pages.pages.ranks) == ["0/1/0", "0/1/1"]
    _ready(node, "d")
    assert not waiting.done()
    _ready(node, "p")
    await waiting
    await asyncio.wait_for(nodes.have(args, 5), 5)
    segment.close()


async def test_a_node_that_is_missing_or_cannot_is_named(group: NodeGroup) -> None:
    nodes = _nodes(group)
    refusal = await _refusal(nodes.have({"document": "d"}, 5))
    assert refusal.reason is Reason.SERVER_AWAY
    assert "--node-rank 1" in refusal.message
    node = _joined(group)
    waiting = asyncio.ensure_future(nodes.have({"page": "p"}, 5))
    await _asked(node)
    _ready(node, "p", "no memory; free some", "MEMORY_EXHAUSTED")
    refusal = await _refusal(waiting)
    assert (refusal.reason, refusal.message) == (
        Reason.MEMORY_EXHAUSTED,
        "node 1: no memory; free some",
    )
    # It is asked again.
    waiting = asyncio.ensure_future(nodes.have({"page": "p"}, 5))
    assert (await _asked(node)).pages.name == "p"
    _ready(node, "p")
    await waiting


async def test_none_is_asked_where_another_one_is_missing(group: NodeGroup) -> None:
    node = _joined(group)
    refusal = await _refusal(_nodes(group, 4).have({"page": "p"}, 5))
    assert "--node-rank 2" in refusal.message
    waiting = asyncio.ensure_future(_nodes(group).have({"page": "q"}, 5))
    assert (await _asked(node)).pages.name == "q"
    _ready(node, "q")
    await waiting


async def test_a_node_that_leaves_ends_what_waits_for_it(group: NodeGroup) -> None:
    node, nodes = _joined(group), _nodes(group)
    before = nodes.changes
    waiting = asyncio.ensure_future(nodes.have({"page": "p"}, 5))
    await _asked(node)
    group.part(node, "has exited")
    refusal = await _refusal(waiting)
    assert refusal.reason is Reason.SERVER_AWAY
    assert "node 1 has exited" in refusal.message
    with pytest.raises(WeightSyncError, match="has no weightsync-server"):
        nodes.check(before)
    _joined(group)
    with pytest.raises(WeightSyncError, match="restarted during the apply"):
        nodes.check(before)
    nodes.check(nodes.changes)


async def test_the_one_that_joins_last_is_the_node(group: NodeGroup) -> None:
    first, second = _joined(group), _joined(group)
    assert "replaced" in first.left
    group.part(first, "has exited")
    assert group.find(1) is second


async def test_what_is_no_node_of_the_engine_ends_nothing(group: NodeGroup) -> None:
    _joined(group, 7)
    node, nodes = _joined(group), _nodes(group)
    before = nodes.changes
    # One that came before anybody knew, and goes.
    stray = group.find(7)
    assert stray is not None
    group.part(stray, "has exited")
    with pytest.raises(WeightSyncError, match="has 2 nodes and no node 7; set --node-rank") as why:
        _joined(group, 7)
    assert why.value.reason is Reason.REQUEST_INVALID
    nodes.check(before)
    assert group.find(1) is node


async def test_a_pause_waits_for_no_node_to_stage(group: NodeGroup, server: SegmentServer) -> None:
    segment = Segment.create(10)
    server.publish("d", segment.read_only_fd(), 10)
    nodes = _nodes(group)
    with pytest.raises(WeightSyncError, match="has no weightsync-server"):
        nodes.check_staged("d")
    node = _joined(group)
    waiting = asyncio.ensure_future(nodes.have({"document": "d"}, 5))
    await _asked(node)
    with pytest.raises(WeightSyncError, match="lost what it had staged"):
        nodes.check_staged("d")
    _ready(node, "d")
    await waiting
    nodes.check_staged("d")
    _joined(group)
    with pytest.raises(WeightSyncError, match="lost what it had staged") as lost:
        nodes.check_staged("d")
    assert lost.value.reason is Reason.SERVER_AWAY
    segment.close()


async def test_a_slow_node_is_waited_for_no_longer_than_is_said(group: NodeGroup) -> None:
    _joined(group)
    refusal = await _refusal(_nodes(group).have({"page": "p"}, 0.05))
    assert refusal.reason is Reason.DEADLINE_EXCEEDED


async def test_what_is_in_no_slot_any_more_is_given_back(
    group: NodeGroup, server: SegmentServer
) -> None:
    segment = Segment.create(10)
    server.publish("d", segment.read_only_fd(), 10)
    node, nodes = _joined(group), _nodes(group)
    waiting = asyncio.ensure_future(nodes.have({"document": "d"}, 5))
    await _asked(node)
    _ready(node, "d")
    await waiting
    server.withdraw("d")
    waiting = asyncio.ensure_future(nodes.have({"page": "p"}, 5))
    assert (await _asked(node)).forget.name == "d"
    assert (await _asked(node)).pages.name == "p"
    _ready(node, "p")
    await waiting
    segment.close()


async def test_a_rank_s_report_comes_to_where_this_server_reads(
    group: NodeGroup, server: SegmentServer
) -> None:
    pages = {rank: PageReader() for rank in _RANKS}
    for rank, page in pages.items():
        server.publish(f"p/{rank}", os.dup(page.segment.fd), page.segment.capacity)
    node = _joined(group)
    await _has_pages(group, node, "p")

    def report(rank: str, name: str = "p") -> dict[str, Any] | None:
        report = pb.RankReport(page=f"{name}/{rank}", report_json=b'{"phase": "ready"}')
        group.report(node, report)
        return pages[rank].read()

    assert report("0/1/0") == {"phase": "ready"}
    # It speaks for its own ranks alone, and not for those that are here.
    assert report("0/0/1") is None
    # One of a session that is over has nobody who reads it.
    await _has_pages(group, node, "q")
    assert report("0/1/1") is None
    assert report("0/1/1", "q") is None
    for page in pages.values():
        page.close()


async def test_nodes_are_those_of_one_engine(group: NodeGroup) -> None:
    _nodes(group)
    _nodes(group)
    with pytest.raises(WeightSyncError, match="a weightsync-server for each") as caught:
        EngineNodes(group, object(), 2, _RANKS)
    assert caught.value.reason is Reason.ENGINE_UNSUPPORTED
    EngineNodes(group, object(), 1, _RANKS)


async def test_bytes_of_what_is_not_staged_are_refused(group: NodeGroup) -> None:
    with pytest.raises(WeightSyncError) as caught:
        group.read("nothing", None)
    assert caught.value.reason is Reason.VERSION_UNKNOWN


async def test_who_reads_a_shard_has_no_layout_read(
    group: NodeGroup, server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It takes a tenth of a second for tens of thousands of tensors, on the loop of every call.
    layout = Layout((ShardEntry("a", 8, 0), ShardEntry("b", 8, 0)), ())
    document, shard = (
        StagedVersion(Manifest(layout, ()), ("x", "y")).to_segment(),
        Segment.create(8),
    )
    shard.fill(0, b"12345678")
    server.publish("d", document.read_only_fd(), document.capacity)
    server.publish("y", shard.read_only_fd(), 8)
    monkeypatch.setattr(Layout, "from_json", None)
    found = group.read("d", 1)
    assert bytes(found.view) == b"12345678"
    found.close()
    with pytest.raises(WeightSyncError, match="d has no shard 2"):
        group.read("d", 2)
    for segment in (document, shard):
        segment.close()


async def test_nodes_of_an_engine_that_is_gone_may_be_another_engines(group: NodeGroup) -> None:
    _nodes(group)
    with pytest.raises(WeightSyncError, match="an engine of several nodes already"):
        EngineNodes(group, object(), 2, _RANKS)
    group.release(object())
    with pytest.raises(WeightSyncError, match="an engine of several nodes already"):
        EngineNodes(group, object(), 2, _RANKS)
    group.release(_ENGINE)
    EngineNodes(group, object(), 2, _RANKS)
