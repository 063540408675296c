"""An AsyncLLM in a process of its own with our bridge, called over a pipe as an actor of Ray is."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from weightsync.vllm.endpoint import serve

if TYPE_CHECKING:
    from collections.abc import Mapping
    from multiprocessing.connection import Connection
    from pathlib import Path

__all__ = ["LlmActor"]

_START_S = 300.0


@dataclass
class LlmActor:
    """One engine; what is sent to it is pickled between processes of this test, as Ray does.

    Implements vLLM's VLLMWeightSyncClient.

    Attributes:
        model: Checkpoint directory.
        run_dir: For sockets; a short path.
        backend: Of vLLM's weight transfer.
        arguments: More of vLLM's engine, by the names of AsyncEngineArgs.
        variables: More environment variables.
    """

    model: Path
    run_dir: Path
    backend: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    def start(self) -> None:
        """Return when it is up; a weightsync-server must prove it before it generates."""
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self.run_dir.mkdir(parents=True, exist_ok=True)
        variables = {
            "VLLM_PLUGINS": "weightsync",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{self.run_dir / 'engine.sock'}",
            **self.variables,
        }
        arguments = {"model": str(self.model), "max_model_len": 512, **self.arguments}
        self._process = context.Process(
            target=_run, args=(other, self.backend, arguments, variables), daemon=False
        )
        self._process.start()
        # Its end is the process's alone, so that the pipe ends with the process.
        other.close()
        assert self._pipe.poll(_START_S), "vLLM did not start"
        try:
            assert self._pipe.recv() == "up"
        except EOFError:
            self._process.join()
            pytest.fail(f"vLLM ended with {self._process.exitcode} while it started")

    def stop(self) -> None:
        """End it."""
        if self._process.is_alive():
            self._pipe.send(("stop", ()))
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def complete(self, prompt: str) -> list[int]:
        """Return the tokens of a greedy completion."""
        tokens: list[int] = self._ask("complete", prompt)
        return tokens

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Call the verb."""
        self._ask("init_weight_transfer_engine", init_info)

    def start_weight_update(self) -> None:
        """Call the verb."""
        self._ask("start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        """Call the verb."""
        self._ask("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Call the verb."""
        self._ask("finish_weight_update", weight_version)

    def _ask(self, verb: str, *args: Any) -> Any:
        self._pipe.send((verb, args))
        outcome, error = self._pipe.recv()
        if error:
            raise RuntimeError(error)
        return outcome


def _run(pipe: Connection, backend: str, arguments: Any, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    asyncio.run(_serve(pipe, backend, arguments))


async def _serve(pipe: Connection, backend: str, arguments: dict[str, Any]) -> None:
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    config = WeightTransferConfig(backend=backend)
    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(weight_transfer_config=config, **arguments))
    bridge = await serve(llm)
    pipe.send("up")
    while True:
        verb, args = await asyncio.to_thread(pipe.recv)
        if verb == "stop":
            break
        try:
            pipe.send((await _call(llm, verb, *args), ""))
        except Exception as error:  # noqa: BLE001 - it is raised on the other side
            pipe.send((None, f"{type(error).__name__}: {error}"))
    await bridge.stop()
    llm.shutdown()


async def _call(llm: Any, verb: str, *args: Any) -> Any:
    from vllm import SamplingParams
    from vllm.distributed.weight_transfer import base

    if verb == "complete":
        sampling = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
        async for output in llm.generate(args[0], sampling, request_id=os.urandom(4).hex()):
            last = output
        return list(last.outputs[0].token_ids)
    kinds = {
        "init_weight_transfer_engine": lambda info: base.WeightTransferInitRequest(init_info=info),
        "update_weights": lambda info: base.WeightTransferUpdateRequest(update_info=info),
    }
    requests = [kinds[verb](info) for info in args] if verb in kinds else []
    labels = [label for label in args if label is not None] if verb not in kinds else []
    return await getattr(llm, verb)(*requests, *labels)
