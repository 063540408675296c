"""Updates of two ranks: their real receivers and segment socket, a wire that the test works."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load

from weightsync.engine import EngineState
from weightsync.errors import Reason, WeightSyncError
from weightsync.shm.segment_socket import SegmentServer
from weightsync.vllm.bridge.extension_points import EngineOffer
from weightsync.vllm.bridge.sleep_guard import DeviceTurns
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.extensions.received.received_updates import ReceivedUpdates
from weightsync.vllm.extensions.received.update_file import UpdateSink
from weightsync.vllm.extensions.received.update_receiver import UpdateReceiver
from weightsync.vllm.worker.rank_job import RefusedCallError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

_SENT = {"a": torch.arange(4.0), "b": torch.tensor([1, 2], dtype=torch.int8)}


def _info(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


class _Wire:
    """What vLLM's engine of a transfer is to a receiver.

    Attributes:
        model: Where tensors go.
        closed: How often it was shut down.
    """

    def __init__(self, rank: _Rank, sink: UpdateSink) -> None:
        self.model = sink
        self.closed = 0
        self._rank = rank

    def parse_init_info(self, info: dict[str, Any]) -> Any:
        return info

    parse_update_info = parse_init_info

    def init_transfer_engine(self, info: Any) -> None:
        del info
        self._rank.gate.wait()

    def receive_weights(self, info: Any) -> None:
        for name in info["names"]:
            self._rank.gate.wait()
            if self._rank.fault:
                raise RuntimeError(self._rank.fault)
            if name in self._rank.sent:
                self.model.load_weights([(name, self._rank.sent[name])])

    def shutdown(self) -> None:
        self.closed += 1
        self._rank.closed.set()


class _Rank:
    """One rank, with our backend as it is in a worker."""

    device = torch.device("cpu")

    def __init__(self, number: int) -> None:
        self.name = f"0/0/{number}"
        self.gate = threading.Event()
        self.gate.set()
        self.closed = threading.Event()
        self.fault = ""
        self.sent: dict[str, torch.Tensor] = dict(_SENT)
        self.receiver = UpdateReceiver(self, keeps=number == 0)

    def make_wire(self, sink: UpdateSink) -> Any:
        return _Wire(self, sink)

    def close_wire(self, wire: Any) -> None:
        wire.shutdown()

    def end_update(self, wire: Any) -> None:
        pass

    def own_update(self, info: Mapping[str, Any]) -> dict[str, Any]:
        return dict(info)

    def call(self, args: Mapping[str, Any]) -> dict[str, Any]:
        reply: dict[str, Any] = {"ok": True, "rank": self.name, "error": ""}
        try:
            return reply | self.receiver.call(args)
        except (RefusedCallError, ValueError) as error:
            return reply | {"ok": False, "error": str(error)}


class _Site:
    def __init__(self, socket: Path) -> None:
        self.ranks = [_Rank(number) for number in range(2)]
        self.segments = SegmentServer(socket)
        self.state = EngineState.SERVING
        self.applies = False
        self.settled = 0
        self.turns = DeviceTurns(lambda: self.applies, self._settle)
        offer = EngineOffer(
            None,
            "weightsync_nccl",
            lambda _, args: self._call(args),
            lambda: (self.state, "as the test says"),
            self.turns,
            EngineSettings("", "", update_timeout_s=1.5),
        )
        self.updates = ReceivedUpdates(offer)
        self.taken: list[dict[str, torch.Tensor]] = []
        self.says = ""
        self.server: asyncio.Task[None] | None = None

    async def _call(self, args: Mapping[str, Any]) -> list[dict[str, Any]]:
        await asyncio.sleep(0)
        return [rank.call(args) for rank in self.ranks]

    async def _settle(self) -> None:
        assert self.turns.receiving
        self.settled += 1

    async def serve(self) -> None:
        """Take every update as a server does, and say what became of it."""
        async with contextlib.aclosing(self.updates.watch()) as updates:
            async for update in updates:
                future = self.segments.expect_offer("o")
                await self.updates.offer(update.update_id, str(self.segments.path), "o")
                found: dict[str, torch.Tensor] = {}
                for _, size, fd in await asyncio.wrap_future(future):
                    found |= load(os.pread(fd, size, 0))
                    os.close(fd)
                self.taken.append(found)
                await self.updates.end(update.update_id, 0 if self.says else 7, self.says)

    async def watch(self) -> None:
        self.server = asyncio.create_task(self.serve())
        await asyncio.sleep(0)

    async def send(self, *parts: Mapping[str, torch.Tensor]) -> None:
        await self.updates.start()
        for part in parts or (_SENT,):
            await self.updates.receive(_info(part))
        await self.updates.finish("")

    async def close(self) -> None:
        for rank in self.ranks:
            rank.gate.set()
        if self.server is not None:
            self.server.cancel()
            await asyncio.wait([self.server])
        self.segments.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="ru") as folder:
        yield Path(folder)


@pytest.fixture
async def site(folder: Path) -> AsyncIterator[_Site]:
    made = _Site(folder / "s")
    await made.watch()
    await made.updates.open({})
    yield made
    await made.close()


async def _refusal(work: Any, reason: Reason = Reason.ENGINE_REFUSED) -> str:
    with pytest.raises(WeightSyncError) as caught:
        await work
    assert caught.value.reason is reason
    return caught.value.message


async def test_what_came_in_parts_is_one_update(site: _Site) -> None:
    await site.send(*({name: tensor} for name, tensor in _SENT.items()))
    await site.send()
    for found in site.taken:
        assert found.keys() == _SENT.keys()
        assert all(torch.equal(found[name], _SENT[name]) for name in _SENT)
    assert not any(file for rank in site.ranks for file in rank.receiver._sink.files)


async def test_the_trainer_is_told_why_the_server_does_not_serve_it(site: _Site) -> None:
    site.says = "the engine does not take it"
    assert await _refusal(site.send()) == site.says
    site.says = ""
    # The connection is as it was.
    await site.send()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_fails_voids_the_update_and_the_connection(
    site: _Site, rank: int
) -> None:
    site.ranks[rank].fault = "broken"
    said = await _refusal(site.send())
    assert said.startswith(f"rank 0/0/{rank} did not receive the update: RuntimeError: broken; ")
    assert "has failed" in await _refusal(site.updates.finish(""))
    assert site.taken == []
    assert "call init_weight_transfer_engine" in await _refusal(site.updates.start())
    site.ranks[rank].fault = ""
    await site.updates.open({})
    await site.send()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_tensor_that_did_not_come_voids_the_update_alone(site: _Site, rank: int) -> None:
    del site.ranks[rank].sent["b"]
    assert "did not arrive, such as 'b'" in await _refusal(site.send())
    assert "has failed" in await _refusal(site.updates.finish(""))
    assert site.taken == []
    site.ranks[rank].sent = dict(_SENT)
    await site.send()


@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_gets_nothing_is_not_waited_for_for_ever(site: _Site, rank: int) -> None:
    site.ranks[rank].gate.clear()
    said = await _refusal(site.send())
    assert f"rank 0/0/{rank} did not receive the update: nothing arrived for 1.5 s" in said
    # That is what ends its wait.
    assert await asyncio.to_thread(site.ranks[rank].closed.wait, 10)
    sink = site.ranks[rank].receiver._sink
    site.ranks[rank].gate.set()
    await site.updates.open({})
    await site.send()
    # What the thread that was left wrote went nowhere.
    assert sink.arrived == 0
    assert len(site.taken) == 1


async def test_a_trainer_that_does_not_come_is_not_waited_for_for_ever(site: _Site) -> None:
    site.ranks[1].gate.clear()
    assert "rank 0/0/1 did not meet the trainer" in await _refusal(site.updates.open({}))
    site.ranks[1].closed.clear()
    site.ranks[1].gate.set()
    # Who comes late finds a closed door.
    assert await asyncio.to_thread(site.ranks[1].closed.wait, 10)
    await site.updates.open({})
    await site.send()


def _open_files() -> int:
    """Return how many descriptors there are of memory for updates."""
    names = []
    for link in Path("/proc/self/fd").iterdir():
        # Others of the process come and go.
        with contextlib.suppress(FileNotFoundError):
            names.append(str(link.readlink()))
    return sum(name.startswith("/memfd:weightsync-update") for name in names)


async def test_the_connection_and_the_memory_of_an_update_are_given_back(site: _Site) -> None:
    before = _open_files()
    await site.updates.start()
    await site.updates.receive(_info(_SENT))
    assert _open_files() > before
    await site.updates.leave()
    assert _open_files() == before
    for rank in site.ranks:
        assert await asyncio.to_thread(rank.closed.wait, 10)
    assert "call init_weight_transfer_engine" in await _refusal(site.updates.start())


async def test_verbs_come_one_after_the_other(site: _Site) -> None:
    site.ranks[1].gate.clear()
    await site.updates.start()
    receiving = asyncio.create_task(site.updates.receive(_info(_SENT)))
    await asyncio.sleep(0)
    assert "is running" in await _refusal(site.updates.start(), Reason.APPLY_BUSY)
    site.ranks[1].gate.set()
    await receiving
    await site.updates.finish("")


async def test_verbs_out_of_order_are_refused(site: _Site) -> None:
    invalid = Reason.REQUEST_INVALID
    assert "start_weight_update" in await _refusal(site.updates.finish(""), invalid)
    await site.updates.start()
    assert "no tensor has arrived" in await _refusal(site.updates.finish(""), invalid)
    await site.updates.receive(_info(_SENT))
    assert "over 256 bytes" in await _refusal(site.updates.finish("x" * 257), invalid)


async def _ended(site: _Site, refusal: str) -> None:
    """Check that what a trainer has sent already can be taken for nothing that comes later."""
    assert "call init_weight_transfer_engine and send the update again" in refusal
    for rank in site.ranks:
        assert await asyncio.to_thread(rank.closed.wait, 10)
    assert "call init_weight_transfer_engine" in await _refusal(site.updates.start())
    await site.updates.open({})
    await site.send()


async def test_tensors_of_no_update_end_the_connection(site: _Site) -> None:
    said = await _refusal(site.updates.receive(_info(_SENT)), Reason.REQUEST_INVALID)
    assert "start_weight_update" in said
    await _ended(site, said)


async def test_tensors_that_no_rank_receives_end_the_connection(site: _Site) -> None:
    await site.updates.start()
    info = _info(_SENT)
    info["names"][1] = info["names"][0]
    said = await _refusal(site.updates.receive(info))
    assert "is announced twice" in said
    assert "has failed" in await _refusal(site.updates.finish(""))
    await _ended(site, said)


async def test_tensors_of_an_update_that_has_failed_end_the_connection(site: _Site) -> None:
    await site.updates.start()
    await site.updates.receive(_info({"a": _SENT["a"]}))
    again = await _refusal(site.updates.receive(_info({"a": _SENT["a"]})))
    assert "already arrived in this update" in again
    assert "init_weight_transfer_engine" not in again
    said = await _refusal(site.updates.receive(_info({"b": _SENT["b"]})))
    assert "has failed" in said
    await _ended(site, said)


async def test_tensors_that_come_during_a_verb_end_the_connection_after_it(site: _Site) -> None:
    site.ranks[1].gate.clear()
    await site.updates.start()
    receiving = asyncio.create_task(site.updates.receive(_info({"a": _SENT["a"]})))
    await asyncio.sleep(0)
    said = await _refusal(site.updates.receive(_info({"b": _SENT["b"]})), Reason.APPLY_BUSY)
    site.ranks[1].gate.set()
    await receiving
    assert "called again before it was answered" in await _refusal(site.updates.finish(""))
    await _ended(site, said)


async def test_memory_of_an_update_that_failed_is_given_back(site: _Site) -> None:
    before = _open_files()
    for fault in ("broken", ""):
        await site.updates.start()
        await site.updates.receive(_info({"a": _SENT["a"]}))
        assert _open_files() > before
        site.ranks[0].fault = fault
        if not fault:
            site.ranks[0].sent.clear()
        await _refusal(site.updates.receive(_info({"b": _SENT["b"]})))
        assert _open_files() == before
        site.ranks[0].fault = ""
        if fault:
            await site.updates.open({})


async def test_memory_of_an_update_that_nobody_finishes_is_given_back(
    site: _Site, caplog: pytest.LogCaptureFixture
) -> None:
    before = _open_files()
    await site.updates.start()
    await site.updates.receive(_info(_SENT))
    assert _open_files() > before
    async with asyncio.timeout(10):
        while _open_files() > before:  # noqa: ASYNC110 - nobody tells when it is dropped
            await asyncio.sleep(0.02)
    assert "is dropped: no verb was called for 1.5 s" in caplog.text
    assert "no verb was called" in await _refusal(site.updates.finish(""))
    # That is no matter of the connection to the trainer.
    await site.send()


async def test_two_trainers_are_never_one_update(site: _Site) -> None:
    await site.updates.start()
    await site.updates.receive(_info({"a": _SENT["a"]}))
    for verb in (site.updates.start(), site.updates.open({})):
        assert "another update was begun" in await _refusal(verb, Reason.APPLY_BUSY)
    await site.updates.receive(_info({"b": _SENT["b"]}))
    await site.updates.finish("")
    assert [list(found) for found in site.taken] == [["a", "b"]]


async def test_an_update_that_was_not_finished_is_dropped_by_the_next(site: _Site) -> None:
    await site.updates.start()
    await site.updates.receive(_info({"a": _SENT["a"]}))
    await asyncio.sleep(2)
    await site.send({"b": _SENT["b"]})
    assert [list(found) for found in site.taken] == [["b"]]


async def test_a_trainer_waits_for_an_apply_and_an_apply_for_no_trainer(site: _Site) -> None:
    await site.updates.start()
    site.applies, settled = True, site.settled
    receiving = asyncio.create_task(site.updates.receive(_info(_SENT)))
    await asyncio.sleep(0.05)
    assert not site.turns.receiving
    site.ranks[1].gate.clear()
    site.applies = False
    async with asyncio.timeout(10):
        while site.ranks[0].receiver._sink.arrived < len(_SENT):  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.01)
    assert site.settled == settled + 1
    with pytest.raises(WeightSyncError, match="a trainer is sending weights"):
        site.turns.check_free()
    site.ranks[1].gate.set()
    await receiving
    site.turns.check_free()
    await site.updates.finish("")


async def test_a_trainer_does_not_wait_for_an_apply_without_end(site: _Site) -> None:
    await site.updates.start()
    site.applies = True
    said = await _refusal(site.updates.receive(_info(_SENT)), Reason.APPLY_BUSY)
    assert "an apply of this engine is under way" in said
    site.applies = False
    await _ended(site, said)


async def test_to_get_memory_is_no_time_in_which_a_trainer_is_late(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = UpdateSink.begin

    def slow(self: UpdateSink, tensors: Any) -> None:
        time.sleep(1)
        begin(self, tensors)

    monkeypatch.setattr(UpdateSink, "begin", slow)
    await site.send()
    assert len(site.taken) == 1


async def test_while_nobody_watches_no_update_is_begun(
    site: _Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    from weightsync.vllm.extensions.received import received_updates

    monkeypatch.setattr(received_updates, "_WATCHED_S", 0.05)
    assert site.server is not None
    site.server.cancel()
    await asyncio.wait([site.server])
    said = await _refusal(site.updates.start(), Reason.ENGINE_AWAY)
    assert "start weightsync-server with --engine for this vLLM" in said
    await site.watch()
    site.state = EngineState.FENCED
    assert "fenced" in await _refusal(site.updates.start(), Reason.ENGINE_AWAY)


async def test_a_watcher_that_goes_away_fails_what_it_was_given(site: _Site) -> None:
    assert site.server is not None
    site.server.cancel()
    await asyncio.wait([site.server])
    lost = site.updates.watch()
    first = asyncio.ensure_future(anext(lost))
    sending = asyncio.create_task(site.send())
    update = await first
    await lost.aclose()
    assert "disconnected before it reported" in await _refusal(sending)
    await site.updates.end(update.update_id, 7, "")
    await site.watch()
    await site.send()


async def test_another_watcher_takes_over(site: _Site) -> None:
    old = site.server
    await site.watch()
    assert old is not None
    await asyncio.wait_for(old, 10)
    await site.send()


async def test_an_update_is_handed_over_once_and_by_its_name(site: _Site) -> None:
    said = await _refusal(site.updates.offer("other", "", ""))
    assert "is not waiting for a server" in said


async def test_a_socket_that_takes_nothing_fails_the_update(site: _Site) -> None:
    assert site.server is not None
    site.server.cancel()
    await asyncio.wait([site.server])
    async with contextlib.aclosing(site.updates.watch()) as updates:
        first = asyncio.ensure_future(anext(updates))
        sending = asyncio.create_task(site.send())
        update = await first
        said = await _refusal(site.updates.offer(update.update_id, "/nowhere", "o"))
        assert "did not hand the update over" in said
        await site.updates.end(update.update_id, 0, said)
        assert await _refusal(sending) == said
    await site.watch()
    # That is no matter of the connection to the trainer.
    await site.send()
