"""Tensors on a GPU that the server on this host copies by itself."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import load_file  # noqa: E402 - after the skip

from benchmarks.servers import weightsync_server  # noqa: E402
from weightsync.shm.same_host import IpcPlacement, SameHostClient  # noqa: E402
from weightsync_client import Client, Fallback, PushKind, ShardedTensor  # noqa: E402
from weightsync_client.transport.cuda_ipc import CudaIpcTransport  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    with weightsync_server(folder, [f"unix:{folder}/ws.sock"], "--fetchers", "2"):
        yield f"unix:{folder}/ws.sock"


@pytest.fixture
def collected(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Indices of the shards that the server copied."""
    shards: list[int] = []
    finish = CudaIpcTransport.finish

    def note(self: CudaIpcTransport, borrower: SameHostClient, then: Any) -> None:
        shards.extend(shard.index for shard in self._begun)
        finish(self, borrower, then)

    monkeypatch.setattr(CudaIpcTransport, "finish", note)
    return shards


def tensors(seed: int) -> dict[str, Any]:
    random = torch.Generator(device="cuda").manual_seed(seed)
    shapes = {"big": (3000, 4097), "small": (33,), "empty": (0, 4), "scalar": ()}
    return {
        f"{name}.{number}": torch.randint(
            -(2**15), 2**15, shape, generator=random, device="cuda", dtype=torch.int16
        ).view(torch.bfloat16)
        for number in range(4)
        for name, shape in shapes.items()
    }


def raw(tensor: Any) -> bytes:
    return bytes(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def check(client: Client, version: int, state: dict[str, Any]) -> None:
    """Compare what the server holds, bit for bit; it compares every digest when it is pulled."""
    with tempfile.TemporaryDirectory() as folder:
        client.pull(folder, version)
        found = {k: t for file in Path(folder).glob("*.safetensors") for k, t in load(file)}
    assert found == {name: raw(tensor) for name, tensor in state.items()}


def load(file: Path) -> list[tuple[str, bytes]]:
    return [(name, raw(tensor)) for name, tensor in load_file(file).items()]


def test_all_bytes_arrive_in_slots_that_are_used_again(address: str, collected: list[int]) -> None:
    with Client(address) as client:
        for seed in range(5):
            state = tensors(seed)
            result = client.push(state, delta="never", shard_bytes=40 << 20)
            assert (result.way, result.way_reason) == ("same_host", "")
            check(client, result.version, state)
    assert collected == [0, 1, 2, 3] * 5


def test_larger_versions_get_larger_memory(address: str, collected: list[int]) -> None:
    with Client(address) as client:
        for factor in (1, 3, 5):
            state = {"t": torch.full((factor << 24,), factor, device="cuda", dtype=torch.uint8)}
            check(client, client.push(state, delta="never").version, state)
    assert collected == [0] * 3


def test_what_lies_otherwise_is_written(address: str, collected: list[int]) -> None:
    state = tensors(7) | {"columns": tensors(8)["big.0"].t(), "host": torch.ones(1000)}
    with Client(address) as client:
        result = client.push(state, delta="never", shard_bytes=30 << 20)
        assert result.way == "same_host"
        check(client, result.version, state)
    assert 0 < len(collected) < 5


def test_a_trainer_can_ask_for_its_own_digests(address: str, collected: list[int]) -> None:
    state = tensors(6)
    with Client(address) as client:
        for way, own in (("auto", False), ("write", True)):
            result = client.push(state, delta="never", same_host=way)
            assert result.way == "same_host"
            assert client.get_version(result.version).trainer_verified is own
            check(client, result.version, state)
    assert collected == [0]


def test_a_copy_is_kept_for_the_next_delta(address: str, collected: list[int]) -> None:
    state = tensors(9)
    with Client(address) as client:
        first = client.push(state)
        state["big.1"][5] += 1
        second = client.push(state, delta="require")
        assert (first.kind, second.kind) == (PushKind.FULL, PushKind.DELTA)
        check(client, second.version, state)
    assert collected == [0]


def test_what_is_copied_faster_than_compared_is_copied(address: str, collected: list[int]) -> None:
    state = tensors(10)
    with Client(address) as client:
        for reason in (Fallback.FIRST, Fallback.COPIED, Fallback.COPIED):
            state["big.1"][5] += 1
            result = client.push(state)
            assert (result.kind, result.fallback_reason) == (PushKind.FULL, reason)
            check(client, result.version, state)
        # It lies elsewhere: written, and kept for the delta after it.
        state = {name: tensor.cpu() for name, tensor in state.items()}
        for kind in (PushKind.FULL, PushKind.DELTA, PushKind.DELTA):
            state["big.1"][5] += 1
            result = client.push(state)
            assert result.kind is kind
            check(client, result.version, state)
    assert collected == [0] * 3


@pytest.mark.parametrize(
    ("offset", "own", "way"), [(1 << 40, True, "stream"), (0, False, "same_host")]
)
def test_memory_that_was_not_told_of_is_not_read(
    address: str, offset: int, own: bool, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = torch.full((1 << 20,), 7, device="cuda", dtype=torch.uint8)
    placed = CudaIpcTransport._placed

    def lie(self: CudaIpcTransport, shard: Any) -> IpcPlacement | None:
        found = placed(self, shard)
        assert found is not None
        handles = found.handles if own else [bytes(64)]
        return found._replace(handles=handles, places=[(0, offset)])

    monkeypatch.setattr(CudaIpcTransport, "_placed", lie)
    with Client(address) as client:
        result = client.push({"t": tensor}, delta="never")
        assert result.way == way
        check(client, result.version, {"t": tensor})


_TRAINER = """
import sys, torch
from weightsync_client import Client
state = {str(n): torch.ones(1 << 30, device="cuda", dtype=torch.uint8) for n in range(4)}
torch.cuda.synchronize()
with Client(sys.argv[1]) as client:
    print("go", flush=True)
    client.push(state, delta="never", version=int(sys.argv[2]))
"""


@pytest.mark.parametrize("after", [0.05, 0.3, 0.6])
def test_a_trainer_that_dies_while_it_is_copied_from_spoils_nobody_else(
    address: str, after: float
) -> None:
    state = tensors(12)
    with Client(address) as client:
        version = max(version.version for version in client.versions()) + 10
        trainer = subprocess.Popen(
            [sys.executable, "-c", _TRAINER, address, str(version)], stdout=subprocess.PIPE
        )
        assert trainer.stdout is not None
        assert trainer.stdout.readline() == b"go\n"
        time.sleep(after)
        trainer.kill()
        trainer.wait()
        trainer.stdout.close()
        for push in [p for p in client.status().models[0].pushes if p.version == version]:
            client.abort(push.push_id)
        for _ in range(3):
            result = client.push(state, delta="never")
            check(client, result.version, state)
        assert result.way == "same_host"


def strips(state: dict[str, Any], writer: int, along: int) -> dict[str, Any]:
    """Return what one of two processes holds: half of each tensor, in memory of its own."""
    found: dict[str, Any] = {}
    for name, tensor in state.items():
        if not tensor.numel() or tensor.dim() <= along:
            # All hold it.
            found[name] = tensor
            continue
        half = -(-tensor.shape[along] // 2)
        local = tensor.split(half, along)[writer].contiguous()
        offsets = [0] * tensor.dim()
        offsets[along] = writer * half
        found[name] = ShardedTensor(tuple(tensor.shape), "BF16", [(tuple(offsets), local)])
    return found


@pytest.mark.parametrize("along", [0, 1])
def test_boxes_of_two_processes_are_copied(address: str, collected: list[int], along: int) -> None:
    state = tensors(20 + along)
    with Client(address) as first, Client(address) as second, ThreadPoolExecutor(2) as pool:
        for step in range(2):
            state["big.1"].view(torch.int16)[5] += 1
            options: dict[str, Any] = {"idempotency_key": f"boxes/{along}/{step}", "writers": 2}
            options |= {"delta": "never", "shard_bytes": 40 << 20}
            parts = [strips(state, writer, along) for writer in range(2)]
            pushed = [
                pool.submit(client.push, part, writer=writer, **options)
                for writer, (client, part) in enumerate(zip((first, second), parts, strict=True))
            ]
            results = [one.result() for one in pushed]
            assert {(result.way, result.way_reason) for result in results} == {("same_host", "")}
            check(first, results[0].version, state)
    assert len(collected) >= 8
