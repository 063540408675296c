"""Which shards the server is asked to copy; the tensors here only say that they lie on a GPU."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch

from weightsync.gpu.ipc import DeviceError, Place
from weightsync.shm.incoming_version import HANDLE_BYTES
from weightsync.shm.same_host import IpcPlacement, SameHostServer, WriteLease
from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.source.shards import tensor_shard
from weightsync_client.source.source import Source
from weightsync_client.source.tensors import Scratch, SourceTensor, wrap
from weightsync_client.transport import cuda_ipc, shm_writer
from weightsync_client.transport.cuda_ipc import CudaIpcTransport
from weightsync_client.transport.shm_writer import ShmWriter

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

GPU, OTHER = torch.device("cuda:0"), torch.device("cuda:1")
UUID = b"u" * 16


def on(device: torch.device | None, name: str, count: int = 4, **other: Any) -> SourceTensor:
    tensor = wrap(name, torch.arange(count, dtype=torch.int16))
    return replace(tensor, device=device, **other)


class Gpu:
    """Tells that every tensor lies in one of two allocations, by turns."""

    def __init__(self) -> None:
        self.asked: list[int] = []
        self.hidden = False

    def place(self, address: int, _: object = None) -> Place:
        if self.hidden:
            raise DeviceError("cuIpcGetMemHandle answered 1")
        self.asked.append(address)
        count = len(self.asked)
        return Place(UUID, bytes([count % 2]) * HANDLE_BYTES, 100 * count)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(cuda_ipc, "place_of", gpu.place)
    monkeypatch.setattr(cuda_ipc, "settle", lambda _: None)
    return gpu


class Server:
    """A borrower that notes what it is asked."""

    def __init__(self) -> None:
        self.told: dict[int, IpcPlacement] = {}
        self.ahead: dict[int, IpcPlacement] = {}
        self.messages: list[dict[int, IpcPlacement]] = []
        self.declines: set[int] = set()
        self.error: Exception | None = None

    def collect(self, shard: int, where: IpcPlacement) -> str:
        self.told[shard] = where
        return "no driver" if shard in self.declines else ""

    def announce_ipc(self, shards: dict[int, IpcPlacement]) -> None:
        assert len(self.told) == 3, "the server has something to do meanwhile"
        self.ahead |= shards
        self.messages.append(shards)

    def collected(self, shard: int) -> bytes:
        if self.error is not None:
            raise self.error
        return b"".join(bytes([shard, number]) * 8 for number in range(4))

    def close(self) -> None:
        pass


class Keeper:
    """Copies only some tensors by itself."""

    def __init__(self, *copied: str) -> None:
        self._copied = copied
        self.kept: list[tuple[str, int, bytes]] = []

    def keep(self, name: str, offset: int, piece: memoryview) -> None:
        self.kept.append((name, offset, bytes(piece)))

    def copies(self, name: str) -> bool:
        return name in self._copied


def begin(
    server: Server, *groups: list[SourceTensor], keeper: Keeper | None = None, stop: bool = False
) -> tuple[CudaIpcTransport, list[int]]:
    """Return a collection of one shard per group, and the indices of what is left."""
    shards = [tensor_shard(group, index, str(index)) for index, group in enumerate(groups)]
    collection = CudaIpcTransport({t.name: t for group in groups for t in group}, keeper)
    ended = threading.Event()
    if stop:
        ended.set()
    left = collection.begin(cast("Any", server), shards, ended)
    return collection, [shard.index for shard in left]


def test_it_tells_ahead_where_all_shards_after_the_first_few_lie(gpu: Gpu) -> None:
    server = Server()
    groups = [[on(None, "host")], *([on(GPU, f"t{n}")] for n in range(6)), [on(None, "other")]]
    server.declines = {5}
    _, left = begin(server, *groups)
    assert left == [0, 5, 6, 7]
    assert sorted(server.ahead) == [4, 5, 6]
    assert {n: server.ahead[n] for n in (4, 5)} == {n: server.told[n] for n in (4, 5)}
    assert len(gpu.asked) == 6, "each is looked up once"


def test_many_tensors_are_told_in_several_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "MOST_PLACES", 4)
    server = Server()
    groups = [[on(GPU, f"{n}{m}") for m in range(2)] for n in range(8)]
    begin(server, *groups)
    assert [sorted(told) for told in server.messages] == [[3, 4], [5, 6], [7]]


def test_few_shards_are_not_told_ahead() -> None:
    server = Server()
    _, left = begin(server, *([on(GPU, f"t{n}")] for n in range(3)))
    assert (left, server.ahead, sorted(server.told)) == ([], {}, [0, 1, 2])


def test_it_tells_where_every_tensor_lies_and_gives_the_digests_by_tensor() -> None:
    server = Server()
    tensors = [on(GPU, "a"), on(GPU, "none", 0), on(GPU, "b"), on(GPU, "c")]
    collection, left = begin(server, tensors, [on(GPU, "d")])
    assert left == []
    told = server.told[0]
    assert told.device == UUID
    assert told.handles == [b"\1" * HANDLE_BYTES, b"\0" * HANDLE_BYTES]
    # Not the one that is empty.
    assert told.places == [(0, 100), (1, 200), (0, 300)]
    shard = tensor_shard(tensors, 0, "0")
    reader = shard.open(Scratch())
    assert told.header == b"".join(reader.read(0, shard.entry.data_start))
    got: list[tuple[int, list[bytes]]] = []
    collection.finish(
        cast("Any", server), lambda shard, digests: got.append((shard.index, digests))
    )
    assert got == [(i, [bytes([i, number]) * 8 for number in range(4)]) for i in (0, 1)]


@pytest.mark.parametrize(
    "group",
    [
        [on(None, "host")],
        [on(GPU, "a"), on(None, "host")],
        [on(GPU, "a"), on(OTHER, "b")],
        [on(GPU, "a"), on(GPU, "strided", in_place=False)],
        [on(torch.device("xpu:0"), "a")],
        [on(GPU, "none", 0)],
        [],
    ],
    ids=["host", "mixed", "two devices", "strided", "no cuda", "empty", "no tensor"],
)
def test_what_cannot_be_copied_is_left_and_the_rest_is_not(group: list[SourceTensor]) -> None:
    server = Server()
    _, left = begin(server, group, [on(GPU, "z")])
    assert left == [0]
    assert list(server.told) == [1]


def test_only_what_would_be_copied_from_one_gpu_counts_as_of_several() -> None:
    groups = [
        [on(GPU, "a"), on(OTHER, "b")],
        [on(GPU, "c"), on(None, "host")],
        [on(GPU, "d"), on(OTHER, "strided", in_place=False)],
        [on(GPU, "e"), on(OTHER, "none", 0)],
    ]
    collection, left = begin(Server(), *groups)
    assert (left, collection.mixed) == ([0, 1, 2], 1)
    collection, _ = begin(Server(), *groups, keeper=Keeper("a"))
    assert collection.mixed == 0


def test_a_shard_of_too_many_tensors_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ipc, "MOST_PLACES", 2)
    server = Server()
    two = [on(GPU, "a"), on(GPU, "none", 0), on(GPU, "b")]
    _, left = begin(server, two, [on(GPU, name) for name in "cde"])
    assert (left, list(server.told)) == ([1], [0])


def test_what_cannot_be_shared_with_another_process_is_left(gpu: Gpu) -> None:
    gpu.hidden = True
    server = Server()
    _, left = begin(server, [on(GPU, "a")], [on(GPU, "b")])
    assert (left, server.told) == ([0, 1], {})


def test_shards_of_files_are_left() -> None:
    server = Server()
    shard = tensor_shard([on(GPU, "a")], 0, "0")
    assert CudaIpcTransport({}, None).begin(cast("Any", server), [shard], threading.Event()) == [
        shard
    ]


def test_who_declines_once_is_not_asked_again() -> None:
    server = Server()
    server.declines.add(1)
    collection, left = begin(server, *([on(GPU, name)] for name in "abc"))
    assert (left, list(server.told)) == ([1, 2], [0, 1])
    got: list[int] = []
    collection.finish(cast("Any", server), lambda shard, _: got.append(shard.index))
    assert got == [0]


def test_nothing_begins_once_it_has_been_stopped() -> None:
    server = Server()
    _, left = begin(server, [on(GPU, "a")], stop=True)
    assert (left, server.told) == ([0], {})


def test_a_keeper_that_needs_the_bytes_gets_them_as_they_are_written() -> None:
    server, keeper = Server(), Keeper("a", "b", "c")
    groups = [on(GPU, "a"), on(GPU, "none", 0)], [on(GPU, "b"), on(GPU, "x")], [on(GPU, "c")]
    server.declines.add(2)
    _, left = begin(server, *map(list, groups), keeper=keeper)
    assert left == [1, 2]
    # It copies those by itself, at their first bytes.
    assert keeper.kept == [("a", 0, b""), ("none", 0, b"")]


# As a part of the hand-off.


def source(*groups: list[SourceTensor]) -> Source:
    shards = [tensor_shard(group, index, str(index)) for index, group in enumerate(groups)]
    return Source(shards, None, tuple(tensor for group in groups for tensor in group))


@pytest.mark.parametrize("error", [ConnectionError("gone"), None])
def test_memory_is_let_go_of_in_the_end_whatever_happens(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server()
    made: list[CudaIpcTransport] = []

    class Noted(CudaIpcTransport):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

        def finish(self, *args: Any) -> None:
            assert len(self._in_use) == 2
            super().finish(*args)

    monkeypatch.setattr(shm_writer, "SameHostClient", lambda *_: server)
    monkeypatch.setattr(shm_writer, "CudaIpcTransport", Noted)
    sizes: list[int] = []
    given = source([on(GPU, "a")], [on(GPU, "b")])
    work = ShmWriter(given, None, sizes.append)
    server.error = error
    if error is None:
        work.run(pb.SameHostOffer(), given.shards)
        assert (set(work.done), work.copied, len(sizes)) == ({0, 1}, {0, 1}, 2)
    else:
        with pytest.raises(ConnectionError):
            work.run(pb.SameHostOffer(), given.shards)
        assert (work.done, work.copied, sizes) == ({}, set(), [])
    (collection,) = made
    assert collection._in_use == []


def test_nothing_is_asked_where_the_trainer_shall_write() -> None:
    server = Server()
    given = source([on(GPU, "a")])
    collection = ShmWriter(given, None, lambda _: None, collects=False)._collection()
    left = collection.begin(cast("Any", server), given.shards, threading.Event())
    assert left == given.shards


class StuckSession:
    """Copies for ever."""

    def __init__(self, asked: threading.Event) -> None:
        self._asked = asked
        self.ended = threading.Event()

    def redeem(self, secret: str) -> None:
        pass

    def lend(self, shard: int) -> WriteLease:
        raise AssertionError(shard)

    def written(self, shard: int, digests: bytes) -> None:
        raise AssertionError(shard, digests)

    def collect(self, _shard: int, _where: dict[str, Any]) -> str:
        return ""

    def announce_ipc(self, shards: dict[int, dict[str, Any]]) -> None:
        raise AssertionError(shards)

    def collected(self, _: int) -> bytes:
        self._asked.set()
        self.ended.wait(20)
        return b""

    def close(self) -> None:
        self.ended.set()


@pytest.fixture
def stuck(tmp_path: Path) -> Iterator[tuple[pb.SameHostOffer, threading.Event]]:
    asked = threading.Event()
    session = StuckSession(asked)
    server = SameHostServer(tmp_path / "l.sock", lambda _: session, 20)
    yield pb.SameHostOffer(socket=str(server.path), secret="s"), asked
    session.ended.set()
    server.close()


def test_it_is_cancelled_while_the_server_copies(
    stuck: tuple[pb.SameHostOffer, threading.Event],
) -> None:
    offer, asked = stuck
    given = source([on(GPU, "a")])
    work = ShmWriter(given, None, lambda _: None)
    errors: list[BaseException] = []
    thread = threading.Thread(target=_run, args=(work, offer, given, errors))
    thread.start()
    assert asked.wait(20)
    work.cancel()
    thread.join(10)
    assert not thread.is_alive()
    assert isinstance(errors[0], OSError)
    assert (work.cancelled, work.done) == (True, {})


def _run(
    work: ShmWriter, offer: pb.SameHostOffer, given: Source, errors: list[BaseException]
) -> None:
    try:
        work.run(offer, given.shards)
    except OSError as error:
        errors.append(error)


@pytest.mark.parametrize("way", ["hidden", "declined"])
def test_why_the_server_does_not_copy_is_told(gpu: Gpu, way: str) -> None:
    server = Server()
    gpu.hidden = way == "hidden"
    server.declines = {0}
    collection, left = begin(server, [on(GPU, "t")])
    assert left == [0]
    words = "expandable_segments" if gpu.hidden else "no driver"
    assert words in collection.refusal
