"""vLLM's own trainers of CUDA IPC and NCCL, over their real wires: what they send is a version.

IPC needs one GPU, which trainer and engine share; NCCL needs two.
"""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from benchmarks.gpu.engine import NO_MULTICAST
from tests.support.llm_actor import LlmActor
from tests.support.models import make_checkpoint
from tests.support.transfer_senders import ipc_sender, nccl_sender
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(500)]

_SHARE = 0.2
#: Some tensors for each packed buffer, none of which is larger.
_BUFFER_BYTES = 32 << 20


class _Trainer:
    """A model on the first GPU, and what it takes to send it.

    Args:
        folders: Checkpoints: what the engine has loaded, and what the trainer begins with.
    """

    def __init__(self, *folders: Path) -> None:
        from transformers import AutoModelForCausalLM

        load = AutoModelForCausalLM.from_pretrained
        self.model = load(folders[1], dtype=torch.bfloat16).to("cuda:0")
        other = load(folders[0], dtype=torch.bfloat16)
        self.loaded = {name: p.detach().clone() for name, p in other.named_parameters()}
        self.trained = {name: p.detach().cpu().clone() for name, p in self.model.named_parameters()}

    def set(self, weights: dict[str, torch.Tensor]) -> None:
        """Have the model hold these."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        torch.cuda.synchronize()


def _check_sends(server: WeightSyncServer, trainer: _Trainer, sender: Any, answers: Any) -> None:
    """Send two contents and go back; the bytes of a version are what the trainer has."""
    loaded = answers()
    first = server.wait_serving().live_version
    for version, weights in ((first + 1, trainer.trained), (first + 2, trainer.loaded)):
        trainer.set(weights)
        sender.send_weights()
        assert server.wait_serving().live_version == version
        assert (answers() == loaded) == (weights is trainer.loaded)
        with Client(server.address) as client:
            assert client.verify().verified
            for one in client.tensors(version):
                expected = weights[one.name].view(torch.uint8).numpy().tobytes()
                assert bytes(one.data) == expected, one.name
    with Client(server.address) as client:
        client.rollback()
    assert answers() != loaded
    sender.send_weights()
    assert answers() == loaded


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="wu-"))
    yield folder
    shutil.rmtree(folder)


def _folders(root: Path) -> list[Path]:
    return [
        make_checkpoint(root / f"{n}", dtype="bfloat16", seed=n, hidden=1024, layers=4)
        for n in range(2)
    ]


@contextmanager
def _serving(root: Path, engine: LlmActor | VllmServer) -> Iterator[WeightSyncServer]:
    server = WeightSyncServer(root / "run", root / "state", flags=("--store", "memory://"))
    with ExitStack() as stack:
        stack.callback(server.stop)
        server.start()
        stack.callback(engine.stop)
        engine.start()
        server.wait_serving()
        yield server


@pytest.mark.parametrize("packed", [False, True])
def test_what_is_sent_over_ipc_is_a_version(root: Path, packed: bool) -> None:
    folders = _folders(root)
    arguments = {
        "dtype": "bfloat16",
        "gpu_memory_utilization": _SHARE,
        # Fixed: vLLM measures the device otherwise, and fails while other engines start there.
        "kv_cache_memory_bytes": 1 << 30,
        "enforce_eager": True,
    }
    actor = LlmActor(folders[0], root / "run", "weightsync_ipc", arguments, NO_MULTICAST)
    with _serving(root, actor) as server:
        trainer = _Trainer(*folders)
        sender = ipc_sender(trainer.model, actor, packed=packed, buffer_bytes=_BUFFER_BYTES)
        _check_sends(server, trainer, sender, lambda: actor.complete("hello world"))
        with pytest.raises(RuntimeError, match="what is unpickled runs code"):
            actor.update_weights({"names": [], "ipc_handles_pickled": "gASV"})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it needs two GPUs")
@pytest.mark.parametrize("packed", [False, True])
def test_what_is_sent_over_nccl_is_a_version(root: Path, packed: bool) -> None:
    from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient

    folders = _folders(root)
    vllm = VllmServer(
        folders[0],
        root / "run",
        dtype="bfloat16",
        flags=(
            "--gpu-memory-utilization", str(_SHARE),
            "--weight-transfer-config", '{"backend": "weightsync_nccl"}',
        ),
        variables={
            **NO_MULTICAST,
            "VLLM_SERVER_DEV_MODE": "1",
            "CUDA_VISIBLE_DEVICES": "1",
            "WEIGHTSYNC_UPDATE_TIMEOUT": "20",
        },
    )  # fmt: skip
    with _serving(root, vllm) as server:
        trainer = _Trainer(*folders)
        client = HTTPVLLMWeightSyncClient(vllm.url)
        sender = nccl_sender(trainer.model, client, 1, packed=packed)
        _check_sends(server, trainer, sender, lambda: vllm.complete("hello world"))
        # A trainer that announces and sends nothing: the wait ends, and generation goes on.
        status, _ = vllm.request("/start_weight_update", {})
        assert status == 200
        update = {"names": ["a"], "dtype_names": ["float32"], "shapes": [[1]]}
        status, answer = vllm.request("/update_weights", {"update_info": update}, timeout=120)
        assert status == 400
        assert "nothing arrived for 20 s" in str(answer)
        assert vllm.answers()
        nccl_sender(trainer.model, client, 1, packed=packed).send_weights()
