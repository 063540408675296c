from __future__ import annotations

import asyncio
import errno
import json
import os
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.open_files import open_files, opened_since
from tests.unit.server.engine.plant import until
from weightsync.errors import Reason, WeightSyncError
from weightsync.model.name_sets import pack, unpack
from weightsync.node.v1 import node_pb2 as node_pb
from weightsync.shm.segment_socket import SegmentClient, SegmentServer
from weightsync.shm.segments import Segment
from weightsync.shm.status_page import PageWriter
from weightsync_server.engine.ranks import RankPages, Ranks
from weightsync_server.engine.worker_reports import NoPlan
from weightsync_server.nodes import EngineNodes, JoinedNode, NodeGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator
    from pathlib import Path

NAMES = ("0/0/0", "0/0/1")


class Workers:
    """An engine of which only the workers are asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.replies: list[dict[str, Any]] = [{"ok": True}, {"ok": True}]
        self.gate: asyncio.Event | None = None
        self.error: Exception | None = None

    async def call_workers(self, method: str, args: dict[str, Any]) -> list[dict[str, Any]]:
        self.calls.append((method, args))
        if self.gate is not None:
            await self.gate.wait()
        if self.error is not None:
            raise self.error
        return [{"rank": NAMES[i % 2]} | reply for i, reply in enumerate(self.replies)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[SegmentServer]:
    made = SegmentServer(tmp_path / "s")
    yield made
    made.close()


@pytest.fixture
def workers() -> Workers:
    return Workers()


def alone(workers: Workers, server: SegmentServer) -> EngineNodes:
    return EngineNodes(NodeGroup(server), workers, 1, NAMES)


@pytest.fixture
def ranks(workers: Workers, server: SegmentServer) -> Iterator[Ranks]:
    made = Ranks(workers, NAMES, server, alone(workers, server))  # type: ignore[arg-type]
    yield made
    made.close()


def _pages(workers: Workers, server: SegmentServer) -> list[PageWriter]:
    prefix = workers.calls[-1][1]["page"]
    with SegmentClient(server.path) as client:
        return [PageWriter(fd) for fd, _ in client.map([f"{prefix}/{name}" for name in NAMES])]


async def _asked(workers: Workers) -> str:
    await until(lambda: bool(workers.calls))
    ticket: str = workers.calls[-1][1].get("ticket", "")
    return ticket


async def test_each_rank_reports_on_its_own_page(
    ranks: Ranks, workers: Workers, server: SegmentServer
) -> None:
    task = asyncio.ensure_future(ranks.prepare("id", "document", compare_live=True, timeout_s=10))
    ticket = await _asked(workers)
    method, args = workers.calls[0]
    assert (method, args["apply_id"], args["document"]) == ("weightsync_prepare", "id", "document")
    pages = await asyncio.to_thread(_pages, workers, server)
    pages[0].write({"ticket": ticket, "phase": "running"})
    pages[1].write({"ticket": ticket, "phase": "ready", "bytes": 7, "proved": True})
    await asyncio.sleep(0.05)
    assert not task.done()
    pages[0].write({"ticket": "of before", "phase": "ready"})
    await asyncio.sleep(0.05)
    assert not task.done(), "a report of another call is no answer"
    pages[0].write({"ticket": ticket, "phase": "failed", "error": "no", "mismatched": ["a"]})
    first, second = await task
    assert (first.rank, first.phase, first.error) == ("0/0/0", "failed", "no")
    assert first.mismatched == ("a",)
    assert (second.rank, second.bytes, second.proved) == ("0/0/1", 7, True)
    for page in pages:
        page.close()


async def test_shards_are_told_when_no_rank_reads_them_any_more(
    ranks: Ranks, workers: Workers, server: SegmentServer
) -> None:
    told: list[int] = []
    task = asyncio.ensure_future(
        ranks.prepare("id", "d", compare_live=False, timeout_s=10, on_read=told.append)
    )
    ticket = await _asked(workers)
    first, second = await asyncio.to_thread(_pages, workers, server)
    running = {"ticket": ticket, "phase": "running"}

    async def most() -> int:
        told.clear()
        await asyncio.sleep(0.05)
        return max(told)

    assert await most() == 0
    first.write({**running, "read": 5})
    assert await most() == 0
    second.write({"ticket": "of before", "phase": "ready"})
    assert await most() == 0, "it told of another call"
    second.write({**running, "read": 3})
    assert await most() == 3
    first.write({"ticket": ticket, "phase": "ready"})
    assert await most() == 3
    second.write(running)
    assert await most() == 0, "it may read everything"
    second.write({**running, "read": 4})
    assert await most() == 4
    second.write({"ticket": ticket, "phase": "needs_capture", "read": 4})
    assert [report.phase for report in await task] == ["ready", "needs_capture"]
    assert told[-1] == 0
    for page in (first, second):
        page.close()


async def test_ranks_that_never_report(ranks: Ranks, workers: Workers) -> None:
    with pytest.raises(WeightSyncError, match="did not finish") as caught:
        await ranks.verify("id", 0.05)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert not ranks.hung, "the call itself has returned"


@pytest.mark.parametrize("method", ["prepare", "verify", "capture"])
@pytest.mark.parametrize(
    ("refused", "reason", "text"),
    [
        (True, Reason.ENGINE_REFUSED, "rank 0/0/1 refused: no"),
        (False, Reason.ENGINE_AWAY, "rank 0/0/1 failed: no; try again"),
    ],
)
async def test_a_rank_that_refuses_the_call_or_fails(
    ranks: Ranks,
    workers: Workers,
    method: str,
    refused: bool,
    reason: Reason,
    text: str,
) -> None:
    workers.replies = [{"ok": True}, {"ok": False, "error": "no", "refused": refused}]
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "prepare": lambda: ranks.prepare("id", "d", compare_live=False, timeout_s=5),
        "verify": lambda: ranks.verify("id", 5),
        "capture": lambda: ranks.capture("d", 5),
    }
    with pytest.raises(WeightSyncError, match=text) as caught:
        await calls[method]()
    assert caught.value.reason is reason


@pytest.mark.parametrize(
    ("error", "names", "count", "sentence"),
    [
        ("push all of them", ["q"], 1, "push all of them (q)"),
        ("push all of them", ["q", "k", "v"], 3, "push all of them (q, k, v)"),
        ("push all of them", list("abcdefghij"), 300, "push all of them (a, b, c and 297 more)"),
        ("the loader refused tensor q: no", ["q"], 1, "the loader refused tensor q: no"),
        ("tensor q is odd", ["q", "k"], 2, "tensor q is odd (q, k)"),
        ("restart vLLM", [], 0, "restart vLLM"),
    ],
)
async def test_a_refusal_is_by_name(
    ranks: Ranks, workers: Workers, error: str, names: list[str], count: int, sentence: str
) -> None:
    reply = {"ok": False, "error": error, "refused": True, "names": names, "names_total": count}
    workers.replies = [{"ok": True}, reply]
    with pytest.raises(WeightSyncError) as caught:
        await ranks.capture("d", 5)
    assert caught.value.message == f"rank 0/0/1 refused: {sentence}"
    assert json.loads(caught.value.metadata.get("tensors", "[]")) == names


async def test_long_names_leave_a_refusal_short(ranks: Ranks, workers: Workers) -> None:
    names = [str(index) + "\N{SNOWMAN}" * 200 for index in range(10)]
    workers.replies = [{"ok": False, "error": "no", "refused": True, "names": names}] * 2
    with pytest.raises(WeightSyncError) as caught:
        await ranks.capture("d", 5)
    assert len(caught.value.message) < 300
    assert json.loads(caught.value.metadata["tensors"]) == names[:1]


@pytest.mark.parametrize(
    ("reply", "digest", "error"),
    [
        ({"ok": True, "apply_id": "id", "content_digest": "d"}, "d", ""),
        (
            {"ok": True, "apply_id": "other", "content_digest": "d"},
            "",
            "apply 'other'",
        ),
        ({"ok": True, "content_digest": "d"}, "", "answered for apply None"),
        ({"ok": False, "apply_id": "id", "content_digest": "d"}, "", "refused without a reason"),
        ({"ok": False, "apply_id": "id", "error": "out of memory"}, "", "out of memory"),
        ({"ok": True, "apply_id": "id", "error": "odd", "content_digest": "d"}, "", "odd"),
        ({"ok": True, "apply_id": "id"}, "", ""),
        ({}, "", "answered for apply None"),
        (
            {"ok": True, "rank": "0/0/7", "apply_id": "id", "content_digest": "d"},
            "",
            "answered as rank '0/0/7'",
        ),
    ],
)
async def test_only_an_answer_to_this_very_commit_counts(
    ranks: Ranks, workers: Workers, reply: dict[str, Any], digest: str, error: str
) -> None:
    workers.replies = [reply, reply]
    first, second = await ranks.commit("id", 7, 5)
    assert (first.rank, second.rank) == NAMES
    assert first.content_digest == digest
    assert error in first.error
    assert bool(error) == bool(first.error)


@pytest.mark.parametrize("count", [0, 1, 3])
async def test_too_few_and_too_many_answers(ranks: Ranks, workers: Workers, count: int) -> None:
    workers.replies = [{"ok": True, "apply_id": "id", "content_digest": "d"}] * count
    with pytest.raises(WeightSyncError, match=f"{count} ranks answered") as caught:
        await ranks.commit("id", 7, 5)
    assert caught.value.reason is Reason.FAULT


@pytest.mark.parametrize("method", ["prepare", "verify", "capture"])
async def test_ranks_that_do_not_answer_before_anything_is_written(
    ranks: Ranks, workers: Workers, method: str
) -> None:
    workers.gate = asyncio.Event()
    calls: dict[str, Callable[[], Awaitable[object]]] = {
        "prepare": lambda: ranks.prepare("id", "d", compare_live=False, timeout_s=0.05),
        "verify": lambda: ranks.verify("id", 0.05),
        "capture": lambda: ranks.capture("d", 0.05),
    }
    with pytest.raises(WeightSyncError, match="check its log, and call again when") as caught:
        await calls[method]()
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert f"did not answer weightsync_{method} within 0.05 s" in caught.value.message
    workers.gate.set()
    await until(lambda: not ranks.hung)


async def test_a_call_that_hangs_is_left_alone_and_nothing_is_sent_behind_it(
    ranks: Ranks, workers: Workers
) -> None:
    workers.gate = asyncio.Event()
    with pytest.raises(WeightSyncError) as caught:
        await ranks.commit("id", 7, 0.05)
    assert caught.value.reason is Reason.DEADLINE_EXCEEDED
    assert ranks.hung
    for _ in range(3):
        with pytest.raises(WeightSyncError, match="has not returned") as caught:
            await ranks.states(5)
        assert caught.value.reason is Reason.ENGINE_FENCED
    assert len(workers.calls) == 1
    # The late answer goes to nobody; the next call gets its own.
    workers.replies = [{"ok": True, "apply_id": "late"}] * 2
    workers.gate.set()
    await until(lambda: not ranks.hung)
    workers.gate, workers.replies = None, [{"ok": True, "content_digest": "d", "dirty": False}] * 2
    assert [state.content_digest for state in await ranks.states(5)] == ["d", "d"]


async def test_a_late_error_is_nobodys(ranks: Ranks, workers: Workers) -> None:
    workers.gate = asyncio.Event()
    with pytest.raises(WeightSyncError):
        await ranks.states(0.02)
    workers.error = WeightSyncError(Reason.ENGINE_AWAY, "gone")
    workers.gate.set()
    await until(lambda: not ranks.hung)


async def test_a_caller_that_is_cancelled_leaves_the_call_alone(
    ranks: Ranks, workers: Workers
) -> None:
    workers.gate = asyncio.Event()
    task = asyncio.ensure_future(ranks.states(60))
    await _asked(workers)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ranks.hung, "its replies are still to come"
    workers.error = WeightSyncError(Reason.ENGINE_AWAY, "gone")
    workers.gate.set()
    await until(lambda: not ranks.hung)


async def test_a_rank_that_tells_nothing_is_dirty(ranks: Ranks, workers: Workers) -> None:
    workers.replies = [{"ok": False}, {"ok": True, "content_digest": "d", "dirty": False}]
    first, second = await ranks.states(5)
    assert (first.content_digest, first.dirty) == ("", True)
    assert (second.content_digest, second.dirty) == ("d", False)


async def test_release_names_what_is_kept(ranks: Ranks, workers: Workers) -> None:
    await ranks.release(["a"], 5)
    workers.replies = [{"ok": True, "mapped": []}] * 2
    await ranks.unmap([], {"s1"}, 5)
    assert [args for _, args in workers.calls] == [
        {"keep": ["a"]},
        {"keep": [], "segments": ["s1"]},
    ]


async def test_a_rank_that_did_not_release_is_told(ranks: Ranks, workers: Workers) -> None:
    workers.replies = [{"ok": True}, {"ok": False, "error": "no"}]
    with pytest.raises(WeightSyncError, match="rank 0/0/1 failed: no") as caught:
        await ranks.release([], 5)
    assert caught.value.reason is Reason.ENGINE_AWAY


@pytest.mark.parametrize(
    ("second", "mapped"),
    [
        ({"ok": True, "mapped": []}, frozenset("a")),
        ({"ok": True, "mapped": ["b"], "busy": ""}, frozenset("ab")),
        ({"ok": True, "mapped": [], "busy": "an apply"}, None),
        ({"ok": False, "mapped": [], "error": "no"}, None),
        ({"ok": True, "mapped": [], "rank": "0/0/7"}, None),
        ({"ok": True}, None),
    ],
)
async def test_nothing_is_unmapped_before_every_rank_tells_so(
    ranks: Ranks, workers: Workers, second: dict[str, Any], mapped: frozenset[str] | None
) -> None:
    workers.replies = [{"ok": True, "mapped": ["a"], "busy": ""}, second]
    assert await ranks.unmap(["id"], {"c"}, 5) == mapped


async def test_loads_are_told_on_pages_of_their_own(
    ranks: Ranks, workers: Workers, server: SegmentServer
) -> None:
    ticket = await ranks.start_load("a" * 32, "document")
    method, args = workers.calls[-1]
    assert (method, args["group"], args["document"]) == ("weightsync_load", "a" * 32, "document")
    assert args["ticket"] == ticket
    pages = await asyncio.to_thread(_pages, workers, server)
    await ranks.start_check("id")
    assert workers.calls[-1][1]["page"] != args["page"], "a check would write over a load's end"
    pages[0].write({"ticket": ticket, "phase": "running", "load": "loading", "percent": 7})
    first, second = ranks.read_loads(ticket)
    assert (first.rank, first.phase, first.percent, first.report) == (NAMES[0], "loading", 7, None)
    assert (second.rank, second.phase, second.percent) == (NAMES[1], "starting", 0)
    end = {"ticket": ticket, "phase": "ready", "held": ["c", "d"], "held_before": True}
    pages[1].write(end | {"load_s": 2.5, "arena_bytes": 9, "loader_restarts": 3})
    second = ranks.read_loads(ticket)[1]
    assert second.report is not None
    assert (second.phase, second.cached, second.holds) == ("ready", True, frozenset("cd"))
    assert (second.seconds, second.arena_bytes, second.restarts) == (2.5, 9, 3)
    pages[1].write(end | {"ticket": "of before"})
    assert ranks.read_loads(ticket)[1].report is None, "another load's end"
    for page in pages:
        page.close()


async def test_a_rank_that_begins_no_load_is_told(ranks: Ranks, workers: Workers) -> None:
    workers.replies = [{"ok": True}, {"ok": False, "error": "it has no loader", "refused": True}]
    with pytest.raises(WeightSyncError, match="rank 0/0/1 refused: it has no loader") as caught:
        await ranks.start_load("a" * 32, "document")
    assert caught.value.reason is Reason.ENGINE_REFUSED


_TWIN = {"ok": True, "transform": "twin"}


@pytest.mark.parametrize(
    ("replies", "why"),
    [
        ([{"ok": True}, {"ok": True}], None),
        ([{"ok": True}, {**_TWIN, "why": "it packs"}], NoPlan("it packs")),
        ([{"ok": True}, {**_TWIN, "why": "a", "remedy": "b"}], NoPlan("a", "b")),
    ],
)
async def test_a_capture_tells_why_there_is_no_plan(
    ranks: Ranks, workers: Workers, replies: list[dict[str, Any]], why: NoPlan | None
) -> None:
    workers.replies = replies
    assert await ranks.capture("d", 5) == ("", why)


async def test_a_state_tells_what_versions_go_through(ranks: Ranks, workers: Workers) -> None:
    workers.replies = [{"ok": True, "transform": "twin"}, {"ok": True}]
    assert [state.transform for state in await ranks.states(5)] == ["twin", "plan"]


async def test_close_withdraws_the_pages(workers: Workers, server: SegmentServer) -> None:
    before = open_files()
    ranks = Ranks(workers, NAMES, server, alone(workers, server))  # type: ignore[arg-type]
    assert len(server._published) == len(NAMES)
    workers.replies = [{"ok": True}, {"ok": True}]
    await ranks.start_load("group", "document")
    # One for what a rank does, and one for what it loads meanwhile.
    assert len(server._published) == 2 * len(NAMES)
    ranks.close()
    assert not server._published
    assert opened_since(before) == []


async def test_a_capture_waits_for_no_node_in_its_pause(
    workers: Workers, server: SegmentServer
) -> None:
    segment = Segment.create(10)
    server.publish("document", segment.read_only_fd(), 10)
    group, node = NodeGroup(server), JoinedNode(1)
    group.join(node)
    nodes = EngineNodes(group, workers, 2, NAMES)
    ranks = Ranks(workers, NAMES, server, nodes)  # type: ignore[arg-type]
    staging = asyncio.ensure_future(ranks.stage("document", "digest", 5))
    request = await anext(aiter(node.requests()))
    assert (request.stage.name, request.stage.content_digest) == ("document", "digest")
    with pytest.raises(WeightSyncError, match="lost what it had staged"):
        await ranks.capture("document", 5)
    assert workers.calls == []
    node.take(node_pb.NodeReady(name="document"))
    await staging
    await ranks.capture("document", 5)
    ((method, _),) = workers.calls
    assert method == "weightsync_capture"
    ranks.close()
    group.close()
    segment.close()


_TENSORS = ("a", "b", "c")


async def test_what_every_rank_ignores_is_told_to_all_of_them(
    ranks: Ranks, workers: Workers
) -> None:
    workers.replies = [
        {"ok": True, "ignored": pack({"a", "b"}, _TENSORS)},
        {"ok": True, "ignored": pack({"b", "c"}, _TENSORS)},
    ]
    unloaded, _ = await ranks.capture("document", 10)
    assert unpack(unloaded, _TENSORS) == {"b"}
    task = asyncio.ensure_future(
        ranks.prepare("id", "document", compare_live=False, timeout_s=10, unloaded=unloaded)
    )
    await until(lambda: len(workers.calls) == 2)
    assert workers.calls[1][1]["unloaded"] == unloaded
    task.cancel()


async def test_a_name_has_no_place_only_where_no_rank_has_one(
    ranks: Ranks, workers: Workers
) -> None:
    workers.replies = [
        {"ok": True, "unplaced": pack({"a", "c"}, _TENSORS)},
        {"ok": True, "unplaced": pack({"c"}, _TENSORS)},
    ]
    assert unpack(await ranks.check("document"), _TENSORS) == {"c"}
    # One that does not tell has a place for all that it did not refuse.
    del workers.replies[1]["unplaced"]
    assert await ranks.check("document") == ""


async def test_ranks_that_speak_of_different_tensors_are_at_fault(
    ranks: Ranks, workers: Workers
) -> None:
    names = [f"n{number}" for number in range(9)]
    workers.replies = [
        {"ok": True, "ignored": pack((), _TENSORS)},
        {"ok": True, "ignored": pack((), names)},
    ]
    with pytest.raises(WeightSyncError, match="disagree") as caught:
        await ranks.capture("document", 10)
    assert caught.value.reason is Reason.FAULT


def test_pages_that_cannot_all_be_published_leave_nothing_open(
    server: SegmentServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    dup, each = os.dup, iter(NAMES[1:])

    def short(fd: int) -> int:
        if next(each, None) is None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return dup(fd)

    before = open_files()
    monkeypatch.setattr(os, "dup", short)
    with pytest.raises(OSError, match="Too many open files"):
        RankPages(NAMES, server)
    assert opened_since(before) == []
