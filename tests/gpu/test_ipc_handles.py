"""Handles that crossed processes as plain data, opened again, and what they lead to kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from safetensors.torch import load  # noqa: E402 - after the skip
from torch.multiprocessing.reductions import rebuild_cuda_tensor  # noqa: E402

from weightsync.vllm.extensions.received.ipc_handles import from_plain  # noqa: E402
from weightsync.vllm.extensions.received.update_receiver import UpdateReceiver  # noqa: E402

pytestmark = pytest.mark.gpu

_SHAPES: dict[str, tuple[int, ...]] = {"big": (3000, 4099), "small": (7,), "one": ()}
_TRAINER = f"""
import json, sys, torch
from torch.multiprocessing.reductions import reduce_tensor
from weightsync.vllm.extensions.received.ipc_handles import to_plain
torch.manual_seed(5)
kept = [torch.randn(s, dtype=torch.bfloat16, device="cuda") for s in {list(_SHAPES.values())}]
print(json.dumps(to_plain([{{"gpu": reduce_tensor(t)[1]}} for t in kept])), flush=True)
sys.stdin.read()
"""


class _Engine:
    """Our backend in a worker, and as much of vLLM's engine of IPC as opens handles."""

    device = torch.device("cuda", 0)
    model: Any = None

    def make_wire(self, sink: Any) -> Any:
        self.model = sink
        return self

    def own_update(self, info: Any) -> Any:
        return info | {"ipc_handles": from_plain(info["ipc_handles"])}

    def close_wire(self, wire: Any) -> None:
        wire.shutdown()

    def end_update(self, wire: Any) -> None:
        pass

    def parse_init_info(self, info: Any) -> Any:
        return info

    parse_update_info = parse_init_info

    def init_transfer_engine(self, info: Any) -> None:
        pass

    def receive_weights(self, info: Any) -> None:
        rebuild: Any = rebuild_cuda_tensor
        pairs = zip(info["names"], info["ipc_handles"], strict=True)
        self.model.load_weights([(name, rebuild(*handle["gpu"])) for name, handle in pairs])

    def shutdown(self) -> None:
        pass


def _until_done(receiver: UpdateReceiver) -> dict[str, Any]:
    while (report := receiver.call({"step": "poll"}))["running"]:
        pass
    return report


def test_what_another_process_has_on_the_gpu_is_kept_bit_for_bit() -> None:
    receiver = UpdateReceiver(_Engine(), keeps=True)
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINER], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as trainer:
        assert trainer.stdout is not None
        handles = json.loads(trainer.stdout.readline())
        info = {
            "names": list(_SHAPES),
            "dtype_names": ["bfloat16"] * len(_SHAPES),
            "shapes": [list(shape) for shape in _SHAPES.values()],
            "ipc_handles": handles,
        }
        opened, checked = {"step": "open", "info": {}}, {"step": "check", "info": info}
        for args in (opened, checked, {"step": "reserve"}):
            receiver.call(args)
            _until_done(receiver)
        receiver.call({"step": "receive", "limit_s": 60.0})
        report = _until_done(receiver)
        trainer.kill()
    assert (report["failure"], report["arrived"]) == ("", len(_SHAPES))
    (file,) = receiver._sink.files
    fd = file.sealed()
    found = load(os.pread(fd, file.size, 0))
    torch.manual_seed(5)
    for name, shape in _SHAPES.items():
        expected = torch.randn(shape, dtype=torch.bfloat16, device="cuda").cpu()
        assert torch.equal(found[name], expected), name
    receiver.call({"step": "drop"})
