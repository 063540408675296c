"""The bridge of an AsyncLLM that a program has by itself, and weights sent by its methods."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.servers import free_port
from tests.support.llm_actor import LlmActor
from tests.support.models import make_checkpoint
from tests.support.vllm_server import cpu_environment
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client

pytestmark = [pytest.mark.vllm, pytest.mark.battery, pytest.mark.timeout(900)]


def test_weights_that_are_sent_by_its_methods_become_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import AutoModelForCausalLM
    from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    from tests.support.gloo_wire import use_gloo

    monkeypatch.setattr(torch.cuda, "current_stream", None)
    use_gloo()
    with ExitStack() as stack:
        root = Path(tempfile.mkdtemp(prefix="wb-"))
        stack.callback(shutil.rmtree, root)
        folders = [make_checkpoint(root / f"{n}", dtype="bfloat16", seed=n) for n in range(2)]
        arguments: dict[str, Any] = {
            "dtype": "bfloat16",
            "enforce_eager": True,
            "worker_extension_cls": "tests.support.gloo_wire.GlooWire",
        }
        variables = {**cpu_environment(), "WEIGHTSYNC_TEST_WIRE": str(root / "fault")}
        actor = LlmActor(folders[0], root / "run", "weightsync_nccl", arguments, variables)
        server = WeightSyncServer(root / "run", root / "state")
        stack.callback(server.stop)
        server.start()
        stack.callback(actor.stop)
        actor.start()
        first = server.wait_serving().live_version
        before = actor.complete("hello world")
        model = AutoModelForCausalLM.from_pretrained(folders[1], dtype=torch.bfloat16)
        trainer = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo("127.0.0.1", free_port(), 2, packed=False, rank=0),
            client=actor,
            source=ModuleSource(model),
        )
        trainer.send_weights()
        assert server.wait_serving().live_version == first + 1
        assert actor.complete("hello world") != before
        with Client(server.address) as client:
            client.rollback()
        assert actor.complete("hello world") == before
        with pytest.raises(RuntimeError, match="what is unpickled runs code"):
            actor.update_weights({"names": [], "ipc_handles_pickled": "gASV"})
