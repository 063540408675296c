"""A rank copies what a trainer has on a GPU; the trainer's memory, and the GPU, are the host's."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.host_kernels import HostKernels
from tests.unit.vllm.cuda.test_staging_proof import Tensors, _Model, _tensors
from tests.unit.vllm.worker.test_prefetch import _at_work, _begin, _Coming, _until
from tests.unit.vllm.worker.test_rank import Worker
from weightsync.gpu.device_kernels import Kernels
from weightsync.gpu.ipc import DeviceError
from weightsync.shm.incoming_version import HANDLE_BYTES
from weightsync.vllm.cuda import device_patch, prefetched, staging_proof
from weightsync.vllm.cuda.cuda_ops import CudaOps
from weightsync.vllm.env import Amount
from weightsync.vllm.worker import worker_methods as worker_

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.support.staging import Staging, Version

#: `odd` and `after` are fused.
_FILES = (("wide", "tiny"), ("odd",), ("after",))
#: Where a trainer's tensors begin in its allocations, bytes.
_OFFSET = 32


class _Gpu:
    """A trainer's allocations, and the device that opens them."""

    def __init__(self) -> None:
        self._memory: list[torch.Tensor] = []
        self.asked = 0
        self.open = 0
        self.copied = 0
        self.refuses = False

    def put(self, tensor: torch.Tensor) -> tuple[bytes, int]:
        """Allocate a tensor; return where it lies."""
        data = tensor.contiguous().reshape(-1).view(torch.uint8)
        self._memory.append(torch.cat([torch.zeros(_OFFSET, dtype=torch.uint8), data]))
        return bytes([len(self._memory)]) * HANDLE_BYTES, _OFFSET

    def spoil(self) -> None:
        for memory in self._memory:
            memory.fill_(0xDD)

    @contextlib.contextmanager
    def opened(self, handle: bytes) -> Iterator[tuple[int, int]]:
        self.asked += 1
        if self.refuses:
            raise DeviceError("cuIpcOpenMemHandle answered 201")
        memory = self._memory[handle[0] - 1]
        self.open += 1
        yield memory.data_ptr(), memory.nbytes
        self.open -= 1

    def closed(self) -> None:
        """Wait until nothing is open."""
        deadline = time.monotonic() + 20
        while self.open:
            assert time.monotonic() < deadline, f"{self.open} allocations stay open"
            time.sleep(0.001)

    def copy(self, target: int, source: int, size: int, stream: int) -> None:
        assert stream == 0
        ctypes.memmove(target, source, size)
        self.copied += size


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    gpu = _Gpu()
    monkeypatch.setattr(prefetched, "device_with", lambda _: gpu)
    monkeypatch.setattr(prefetched, "_PIECE", 100)
    return gpu


@pytest.fixture
def make(staging: Staging, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Worker]:
    def made(*, kernels: bool = True, dtype: Any = torch.float32) -> Worker:
        monkeypatch.setattr(Kernels, "find", lambda _: HostKernels() if kernels else None)
        monkeypatch.setattr(device_patch, "_WORTH", 1)
        cpu = torch.device("cpu")
        monkeypatch.setattr(worker_, "_device_ops", lambda *_: CudaOps(cpu, Amount(1 << 20), 1.0))
        model = _Model(dtype)
        model.load_weights(_tensors(1).items())
        found = Worker(model, staging)
        found.adopt(_staged(staging, _tensors(1)))
        return found

    return made


def _staged(staging: Staging, tensors: Tensors) -> Version:
    return staging.stage_files([save({n: tensors[n] for n in names}) for names in _FILES])


@pytest.fixture
def coming(staging: Staging) -> _Coming:
    return _Coming(staging, _staged(staging, _tensors(2)))


@pytest.fixture
def reading(make: Callable[..., Worker], coming: _Coming, sent: list[int]) -> Worker:
    """A rank that reads what comes, of which nothing was sent yet."""
    worker = make()
    sent.clear()
    _begin(worker, coming)
    return worker


def _lie(coming: _Coming, gpu: _Gpu, *shards: int, tensors: Tensors | None = None) -> int:
    """Tell that shards lie on the GPU; return their bytes."""
    tensors, size = tensors or _tensors(2), 0
    by_shard = coming.version.staged.manifest.layout.by_shard
    for shard in shards:
        names = [entry.name for entry in by_shard[shard] if entry.end > entry.begin]
        coming.writer.mark_ipc(shard, [gpu.put(tensors[name]) for name in names])
        size += sum(tensors[name].nbytes for name in names)
    return size


def _end(worker: Worker, coming: _Coming) -> None:
    coming.writer.end()
    _until(lambda: not _at_work(worker))


def _holds(worker: Worker, dtype: Any = torch.float32, tensors: Tensors | None = None) -> bool:
    wanted = _Model(dtype)
    wanted.load_weights((tensors or _tensors(2)).items())
    pairs = zip(worker.model.parameters(), wanted.parameters(), strict=True)
    return all(torch.equal(live, whole) for live, whole in pairs)


_ALL = tuple(range(len(_FILES)))


def test_what_lies_on_a_gpu_is_copied_and_proved_by_its_digests(
    reading: Worker, coming: _Coming, gpu: _Gpu, sent: list[int]
) -> None:
    worker = reading
    size = _lie(coming, gpu, *_ALL)
    _until(lambda: gpu.copied == size)
    coming.come(*_ALL)
    _end(worker, coming)
    gpu.closed()
    report = worker.job("prepare", "two", coming.version, base="base", ahead="early")
    assert (report["phase"], report["h2d_bytes"], sent) == ("ready", 0, [])
    assert (report["shards"], report["unlike"]) == ([*_ALL], [])
    assert worker.call("commit", apply_id="two")["content_digest"] == coming.version.content_digest
    assert _holds(worker)
    assert worker.job("verify", "two")["proved"] is True


def _calls(monkeypatch: pytest.MonkeyPatch, home: Any, name: str) -> list[str]:
    """Return a list that grows whenever a function of a module or class is called."""
    calls: list[str] = []
    function = getattr(home, name)

    def noted(*given: Any) -> Any:
        calls.append(name)
        return function(*given)

    monkeypatch.setattr(home, name, noted)
    return calls


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Grows whenever somebody looks for what a version changes."""
    return _calls(monkeypatch, device_patch.PatchFinder, "find")


def test_that_too_much_changes_for_a_patch_is_found_once(
    make: Callable[..., Worker], coming: _Coming, gpu: _Gpu, looked: list[str]
) -> None:
    worker = make()
    looked.clear()
    _begin(worker, coming)
    _lie(coming, gpu, *_ALL)
    _until(lambda: not _at_work(worker))
    coming.come(*_ALL)
    report = worker.job("prepare", "two", coming.version, base="base", ahead="early")
    assert (report["patched"], len(looked)) == (False, 1)
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker)


def test_what_is_compared_is_cut_again_only_where_a_parameter_has_moved(
    make: Callable[..., Worker], staging: Staging, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = _calls(monkeypatch, device_patch, "groups_of")
    worker, live = make(), "base"
    # To warm up.
    cut.clear()
    for seed, times in ((2, 1), (3, 1), (4, 2), (5, 2)):
        if seed == 4:
            # Kept: what looks there still must find what was, not crash.
            before = [parameter.data for parameter in worker.model.parameters()]
            for parameter, old in zip(worker.model.parameters(), before, strict=True):
                parameter.data = old.clone()
        version = _staged(staging, _near(seed))
        report = worker.job("prepare", str(seed), version, base=live)
        assert (report["patched"], len(cut)) == (True, times)
        live = str(seed)
        assert worker.call("commit", apply_id=live)["ok"]
        assert _holds(worker, tensors=_near(seed))


@pytest.mark.parametrize("meanwhile", ["", "base", "three"])
def test_what_few_values_change_is_found_before_the_version_is_complete(
    make: Callable[..., Worker],
    gpu: _Gpu,
    staging: Staging,
    meanwhile: str,
    looked: list[str],
) -> None:
    worker = make()
    coming = _Coming(staging, _staged(staging, _near(2)))
    worker.job("prepare", "three", _staged(staging, _near(3)), base="base")
    looked.clear()
    _begin(worker, coming)
    _lie(coming, gpu, *_ALL, tensors=_near(2))
    # Nothing has come yet, and it waits for nothing.
    _until(lambda: not _at_work(worker))
    assert len(looked) == 1
    coming.come(*_ALL)
    if meanwhile:
        # Not what it was compared with, or perhaps not.
        assert worker.call("commit", apply_id=meanwhile)["ok"]
    base = meanwhile or "base"
    report = worker.job("prepare", "two", coming.version, base=base, ahead="early")
    seen = report["patched"], report["unlike"], len(looked)
    assert seen == (True, [], 1 + bool(meanwhile))
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, tensors=_near(2))


@pytest.mark.parametrize("who", ["its own", "another", "released"])
def test_what_it_is_about_to_find_is_waited_for_by_its_own_prepare_alone(
    make: Callable[..., Worker],
    gpu: _Gpu,
    staging: Staging,
    who: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, go = threading.Event(), threading.Event()
    stopped: list[bool] = []
    look = device_patch.PatchFinder.find

    def find(self: Any, staged: Any, pace: Any, stop: Callable[[], bool]) -> Any:
        looking.set()
        assert go.wait(20)
        stopped.append(stop())
        return look(self, staged, pace, stop)

    worker = make()
    coming = _Coming(staging, _staged(staging, _near(2)))
    monkeypatch.setattr(device_patch.PatchFinder, "find", find)
    _begin(worker, coming)
    _lie(coming, gpu, *_ALL, tensors=_near(2))
    assert looking.wait(20)
    coming.come(*_ALL)
    page, (reader,) = staging.pages(["0/0/0"])
    args = {"apply_id": "two", "document": coming.version.document.id, "page": page}
    ahead = "other" if who == "another" else "early"
    assert worker.call("prepare", base="base", ahead=ahead, **args)["ok"]
    if who == "released":
        worker.call("release", keep=["base"])
    go.set()
    _until(lambda: (reader.read() or {"phase": "running"})["phase"] != "running")
    report = reader.read()
    assert report is not None
    if who == "its own":
        assert (report["phase"], report["patched"], stopped) == ("ready", True, [False])
    elif who == "another":
        assert (report["phase"], report["patched"], stopped) == ("ready", True, [True, False])
    else:
        assert (report["phase"], stopped[0]) == ("failed", True)
        return
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, tensors=_near(2))


def _near(seed: int) -> Tensors:
    """Return what differs from the first version in two values."""
    tensors = _tensors(1)
    tensors["wide"][0, seed] += 1
    tensors["after"][seed] += 1
    return tensors


@pytest.mark.parametrize("patched", [False, True])
def test_what_the_trainer_has_written_to_is_read_again(
    make: Callable[..., Worker],
    gpu: _Gpu,
    sent: list[int],
    staging: Staging,
    patched: bool,
) -> None:
    """With a patch that was found with wrong values, and without one."""
    wanted = _near(2) if patched else _tensors(2)
    coming = _Coming(staging, _staged(staging, wanted))
    worker = make()
    told = {name: tensor.clone() for name, tensor in wanted.items()}
    told["wide"][7, 15] += 1
    told["odd"][80] += 1
    _begin(worker, coming)
    size = _lie(coming, gpu, *_ALL, tensors=told)
    _until(lambda: not _at_work(worker))
    assert gpu.copied == size
    begun = worker._weightsync_rank._ops._prefetched  # type: ignore[attr-defined] # as it is set up
    assert (begun.patch is not None) is patched
    coming.come(*_ALL)
    sent.clear()
    report = worker.job("prepare", "two", coming.version, base="base", ahead="early")
    assert (report["shards"], report["unlike"], report["patched"]) == ([*_ALL], [], patched)
    # All but `tiny`, which is as it was told.
    assert len(sent) == 3
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, tensors=wanted)


def test_damage_in_host_memory_is_named_when_it_is_read_after_all(
    make: Callable[..., Worker], coming: _Coming, gpu: _Gpu
) -> None:
    worker = make()
    _lie(coming, gpu, *_ALL)
    gpu.spoil()
    _begin(worker, coming)
    _until(lambda: not _at_work(worker))
    coming.come(*_ALL)
    coming.version.tensor_bytes("wide")[5] ^= 1
    report = worker.job("prepare", "two", coming.version, base="base", ahead="early")
    assert report["unlike"] == ["wide"]


def test_it_ends_before_vllm_takes_the_parameters_away(
    make: Callable[..., Worker],
    gpu: _Gpu,
    staging: Staging,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looking, go = threading.Event(), threading.Event()
    look = device_patch.PatchFinder.find

    def find(self: Any, staged: Any, pace: Any, stop: Callable[[], bool]) -> Any:
        looking.set()
        assert go.wait(20)
        return look(self, staged, pace, stop)

    worker = make()
    monkeypatch.setattr(device_patch.PatchFinder, "find", find)
    coming = _Coming(staging, _staged(staging, _near(2)))
    _begin(worker, coming)
    _lie(coming, gpu, *_ALL, tensors=_near(2))
    assert looking.wait(20)
    # To a server it is not busy; to who is about to sleep it is, until it has looked away.
    assert worker.call("state")["busy"] == ""
    assert worker.call("state", settle=True)["busy"] == "early"
    go.set()
    _until(lambda: worker.call("state", settle=True)["busy"] == "")
    begun = worker._weightsync_rank._ops._prefetched  # type: ignore[attr-defined] # as it is set up
    assert begun.patch is None


@pytest.mark.parametrize("why", ["refused", "outside", "torch", "converted", "not provable"])
def test_what_cannot_be_copied_or_proved_comes_from_the_host(
    make: Callable[..., Worker],
    coming: _Coming,
    gpu: _Gpu,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu.refuses = why == "refused"
    if why == "outside":
        put = gpu.put
        monkeypatch.setattr(gpu, "put", lambda tensor: (put(tensor)[0], _OFFSET + 1))
    if why == "not provable":
        # `after` begins at no multiple of 16 bytes, and `tiny` is short.
        monkeypatch.setattr(staging_proof, "_FETCHED", 1)
    dtype = torch.bfloat16 if why == "converted" else torch.float32
    worker = make(kernels=why != "torch", dtype=dtype)
    _begin(worker, coming)
    _lie(coming, gpu, *_ALL)
    if why not in ("torch", "converted"):
        _until(lambda: gpu.asked > 0)
    if why == "not provable":
        _until(lambda: gpu.copied == _tensors(2)["wide"].nbytes)
    coming.come(*_ALL)
    _end(worker, coming)
    gpu.closed()
    assert (gpu.copied > 0) is (why == "not provable")
    assert worker.job("prepare", "two", coming.version, base="base", ahead="early")["h2d_bytes"]
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker, dtype)


def test_a_block_of_two_shards_is_taken_where_both_lie_there_or_both_have_come(
    reading: Worker, coming: _Coming, gpu: _Gpu, sent: list[int]
) -> None:
    worker = reading
    tensors = _tensors(2)
    size = _lie(coming, gpu, 1, 0)
    # `odd` is fused with `after`, which is sent.
    _until(lambda: gpu.copied == size - tensors["odd"].nbytes)
    coming.come(2, 1, 0)
    _until(lambda: sorted(sent) == sorted(tensors[name].nbytes for name in ("odd", "after")))
    _end(worker, coming)
    report = worker.job("prepare", "two", coming.version, base="base", ahead="early")
    assert (report["shards"], len(sent)) == ([*_ALL], 2)
    assert worker.call("commit", apply_id="two")["ok"]
    assert _holds(worker)
