"""A rank's copies of what another process has on a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from weightsync.shm.incoming_version import HANDLE_BYTES, IpcAddresses  # noqa: E402 - after the skip
from weightsync.vllm.cuda.prefetched import IpcMappings  # noqa: E402
from weightsync.vllm.cuda.uploader import StreamThrottle  # noqa: E402

pytestmark = pytest.mark.gpu

_SIZE = (300 << 20) + 24
_TRAINER = f"""
import json, sys, torch
from weightsync.gpu.ipc import place_of
device = torch.device("cuda", torch.cuda.device_count() - 1)
tensor = torch.arange({_SIZE // 8}, device=device)
torch.cuda.synchronize(device)
place = place_of(tensor.data_ptr())
print(json.dumps([place.handle.hex(), place.offset]), flush=True)
sys.stdin.readline()
del tensor
torch.cuda.empty_cache()
others = [torch.full((1 << 20,), n, device=device) for n in range(400)]
torch.cuda.synchronize(device)
print("freed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def trainer() -> Iterator[tuple[subprocess.Popen[bytes], IpcAddresses]]:
    """A process with a tensor of numbers on the last GPU, and where that lies."""
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    handle, offset = json.loads(process.stdout.readline())
    yield process, [(bytes.fromhex(handle), offset)]
    process.kill()
    process.communicate()


def copied(lent: IpcMappings, target: Any) -> bool:
    done = lent.copy("t", target, bool)
    StreamThrottle(target.device).drain()
    return done


def test_what_another_process_has_is_copied_also_when_it_dies_meanwhile(
    trainer: tuple[subprocess.Popen[bytes], IpcAddresses],
) -> None:
    process, where = trainer
    target = torch.zeros(_SIZE // 8, dtype=torch.int64, device="cuda")
    numbers = torch.arange(_SIZE // 8, device="cuda")
    lent = IpcMappings(target)
    lent.note(["t"], where)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        assert copied(lent, target)
        assert torch.equal(target, numbers)
        process.kill()
        process.wait()
        time.sleep(0.5)
        # The driver keeps what was opened.
        target.zero_()
        assert copied(lent, target)
        assert torch.equal(target, numbers)
    lent.close()
    assert torch.cuda.current_stream().query()


def test_what_was_not_told_of_is_not_copied(
    trainer: tuple[subprocess.Popen[bytes], IpcAddresses],
) -> None:
    _, where = trainer
    ((handle, offset),) = where
    target = torch.zeros(_SIZE // 8, dtype=torch.int64, device="cuda")
    for place in ((bytes(HANDLE_BYTES), 0), (handle, offset + (1 << 30)), (handle, 1 << 62)):
        lent = IpcMappings(target)
        lent.note(["t"], [place])
        assert not copied(lent, target)
        lent.close()
    assert not target.any()
    assert torch.ones(9, device="cuda").sum().item() == 9


def test_memory_that_the_trainer_gives_back_meanwhile_harms_nobody(
    trainer: tuple[subprocess.Popen[bytes], IpcAddresses],
) -> None:
    process, where = trainer
    assert process.stdin is not None
    assert process.stdout is not None
    target = torch.zeros(_SIZE // 8, dtype=torch.int64, device="cuda")
    lent = IpcMappings(target)
    lent.note(["t"], where)
    assert copied(lent, target)
    process.stdin.write(b"\n")
    process.stdin.flush()
    for _ in range(200):
        copied(lent, target)
    assert process.stdout.readline() == b"freed\n"
    # Whatever lies there now.
    copied(lent, target)
    lent.close()
    late = IpcMappings(target)
    late.note(["t"], where)
    copied(late, target)
    late.close()
    assert torch.ones(9, device="cuda").sum().item() == 9
