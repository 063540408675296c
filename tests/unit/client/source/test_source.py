"""What a source may do with its memory while it is pushed, and what counts as read once."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.trained import Tensors, digest_of, model, step
from weightsync_client import AsyncClient, Client, Fallback, InvalidError, PushKind, Streamed
from weightsync_client.snapshot import delta_shards
from weightsync_client.source import tensor_stream
from weightsync_client.source import tensors as tensors_module
from weightsync_client.source.source import make_source
from weightsync_client.source.tensors import CopyMemory, SourceTensor, wrap

Pairs = Iterator[tuple[str, Any]]


@pytest.fixture(autouse=True)
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have several tensors make a shard of a delta."""
    monkeypatch.setattr(delta_shards, "_GROUP_BYTES", 300_000)
    monkeypatch.setattr(delta_shards, "_GROUPS", 8)


def as_torch(tensors: Tensors) -> Pairs:
    buffer = torch.empty(max(map(len, tensors.values())), dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        buffer[: len(tensor)] = tensor
        yield name, buffer[: len(tensor)]
    buffer.zero_()


def as_numpy(tensors: Tensors) -> Pairs:
    buffer = np.empty(max(t.nbytes for t in tensors.values()), np.uint8)
    for name, tensor in tensors.items():
        part = buffer[: tensor.nbytes]
        part[:] = tensor.view(torch.uint8).numpy()
        yield name, torch.from_numpy(part).view(torch.bfloat16)


def as_bytes(tensors: Tensors) -> Pairs:
    buffer = bytearray(max(t.nbytes for t in tensors.values()))
    for name, tensor in tensors.items():
        part = memoryview(buffer)[: tensor.nbytes]
        part[:] = tensor.view(torch.uint8).numpy().data
        yield name, {"dtype": "BF16", "shape": list(tensor.shape), "data": part}


def as_two_in_turn(tensors: Tensors) -> Pairs:
    buffers = torch.empty(2, max(map(len, tensors.values())), dtype=torch.bfloat16)
    for at, (name, tensor) in enumerate(tensors.items()):
        part = buffers[at % 2, : len(tensor)]
        part.copy_(tensor)
        yield name, part


def as_strided(tensors: Tensors) -> Pairs:
    buffer = torch.empty(max(map(len, tensors.values())), 2, dtype=torch.bfloat16)
    for name, tensor in tensors.items():
        buffer[: len(tensor), 1] = tensor
        yield name, buffer[: len(tensor), 1]


FORMS = [as_torch, as_numpy, as_bytes, as_two_in_turn, as_strided]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("streams", [1, 3])
def test_an_iterator_may_use_its_memory_again(
    client: Client, form: Callable[[Tensors], Pairs], streams: int
) -> None:
    tensors = model(count=8)
    first = client.push(form(tensors), streams=streams, shard_bytes=300_000)
    assert first.content_digest == digest_of(tensors)
    step(tensors, 1)
    second = client.push(form(tensors), streams=streams)
    assert (second.kind, second.content_digest) == (PushKind.DELTA, digest_of(tensors))
    for tensor in list(tensors.values())[4:]:
        tensor.copy_(torch.randn(tensor.shape).to(tensor.dtype))
    third = client.push(form(tensors), streams=streams)
    assert (third.fallback_reason, third.content_digest) == (
        Fallback.TOO_DENSE,
        digest_of(tensors),
    )


async def test_an_asynchronous_iterator_may_use_its_memory_again(running: Any) -> None:
    tensors = model(count=8)

    async def source() -> AsyncIterator[tuple[str, Any]]:
        for pair in as_torch(tensors):
            yield pair

    async with AsyncClient(running.address) as aio:
        assert (await aio.push(source())).content_digest == digest_of(tensors)


@pytest.mark.parametrize("streams", [1, 2])
def test_no_more_is_copied_than_the_shards_on_their_way(
    client: Client, monkeypatch: pytest.MonkeyPatch, streams: int
) -> None:
    alive, most = 0, 0
    lock = threading.Lock()
    copied = SourceTensor.copied

    def ended() -> None:
        nonlocal alive
        with lock:
            alive -= 1

    def counted(self: SourceTensor, memory: Any, scratch: Any) -> SourceTensor:
        nonlocal alive, most
        made = copied(self, memory, scratch)
        weakref.finalize(memory, ended)
        with lock:
            alive += 1
            most = max(most, alive)
        return made

    monkeypatch.setattr(SourceTensor, "copied", counted)
    tensors = model(count=40, elements=10_000)
    # Two tensors make a shard; the first of the next is copied before that is known.
    result = client.push(as_torch(tensors), delta="never", streams=streams, shard_bytes=45_000)
    assert result.content_digest == digest_of(tensors)
    assert 2 <= most <= 2 * (streams + 1) + 1
    assert alive == 0


def test_memory_of_copies_is_used_again_once_nobody_reads_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tensors_module, "_MEMORY_BYTES", 100)
    memory = CopyMemory()
    first, second, third = memory.take(60), memory.take(40), memory.take(60)
    views = second.data[10:20]
    places = {array.ctypes.data for array in (first, third)}
    assert len(places) == 2
    first[:], second[:], third[:] = 1, 2, 3
    del first, second
    fourth = memory.take(60)
    assert fourth.ctypes.data not in places, "a view of the first block is in use"
    del views, fourth, third
    assert memory.take(60).ctypes.data in places
    large = memory.take(1000)
    assert len(large) == 1000
    place = large.ctypes.data
    del large
    assert memory.take(1000).ctypes.data == place


@pytest.mark.parametrize("form", [list, tuple, lambda pairs: dict(pairs).items()])
def test_pairs_that_lie_there_are_as_good_as_a_state_dict(form: Callable[[Any], Any]) -> None:
    tensors = model(count=3)
    source = make_source(form(tensors.items()), 1 << 20)
    assert source.again
    assert source.flow is None
    assert source.layout == make_source(tensors, 1 << 20).layout
    assert [tensor.name for tensor in source.tensors] == list(tensors)


def test_a_list_is_read_again_by_a_server_that_has_forgotten_it(
    client: Client, servicer: Any
) -> None:
    tensors = model(count=3)
    forgotten: list[str] = []

    def forget(method: str, _request: Any) -> None:
        if method == "CommitPush" and not forgotten:
            forgotten.append(method)
            servicer.uploads.clear()

    servicer.before = forget
    assert client.push(list(tensors.items())).content_digest == digest_of(tensors)


def test_a_list_names_no_tensor_twice(client: Client) -> None:
    pairs = [*model(count=2).items(), *model(count=1).items()]
    with pytest.raises(InvalidError, match=r"'layers\.0\.weight' twice"):
        client.push(pairs)


def test_a_list_is_written_into_a_server_on_this_host(client: Client) -> None:
    # The server of these tests offers no memory; an iterable is never asked to be written there.
    assert client.push(list(model().items())).way_reason is Streamed.NOT_OFFERED
    assert client.push(iter(model().items()), delta="never").way_reason is Streamed.ITERABLE


# Work that is queued on a device.


class Gpu:
    """A device module whose queued work ends when the test says so."""

    def __init__(self) -> None:
        self.done, self.asked = threading.Event(), threading.Event()
        self.waited: list[str] = []
        self.recorded: list[tuple[str, int]] = []
        gpu = self

        class Stream:
            def synchronize(self) -> None:
                gpu.wait()

        class Event:
            def record(self, stream: Stream) -> None:
                assert isinstance(stream, Stream)

            def synchronize(self) -> None:
                gpu.wait()

        self.Event, self._stream = Event, Stream()

    def current_stream(self, device: torch.device) -> Any:
        self.recorded.append((str(device), threading.get_ident()))
        return self._stream

    def wait(self) -> None:
        self.waited.append(threading.current_thread().name)
        self.asked.set()
        self.done.wait(60)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu = Gpu()
    monkeypatch.setattr(torch, "xpu", gpu)

    def on_gpu(name: str, value: object) -> SourceTensor:
        return replace(wrap(name, value), device=torch.device("xpu:1"))

    monkeypatch.setattr(tensor_stream, "wrap", on_gpu)
    return gpu


async def test_the_event_loop_waits_for_no_device(running: Any, gpu: Gpu) -> None:
    tensors = model(count=2)
    async with AsyncClient(running.address) as aio:
        handle = await aio.push_async(tensors, delta="never")
        assert not gpu.done.is_set()
        assert "MainThread" not in gpu.waited
        # The stream is that of whoever called, whose work writes to the tensors.
        assert gpu.recorded == [("xpu:1", threading.get_ident())]
        assert "BeginPush" not in running.servicer.calls
        gpu.done.set()
        assert (await handle.committed).content_digest == digest_of(tensors)


def test_nothing_is_read_before_queued_work_is_done(
    client: Client, servicer: Any, gpu: Gpu
) -> None:
    tensors = model(count=2)
    expected = model(count=2)
    step(expected, 1)
    handle = client.push_async(tensors)
    assert gpu.asked.wait(20), "nobody waits for the device"
    step(tensors, 1)
    assert servicer.calls == ["GetStatus"]
    gpu.done.set()
    assert handle.committed.result(20).content_digest == digest_of(expected)


def test_a_device_that_fails_lets_the_next_push_go(client: Client, gpu: Gpu) -> None:
    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    gpu.wait = fail  # type: ignore[method-assign] # for this test
    with pytest.raises(RuntimeError, match="illegal memory access"):
        client.push(model())
    assert client.push(as_numpy(model())).version == 1
