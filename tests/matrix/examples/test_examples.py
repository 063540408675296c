"""Every example as a user runs it, against one real vLLM where it needs an engine."""

from __future__ import annotations

import ast
import inspect
import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples import fsdp2, train_and_push
from examples.demo.model import PROMPT, SENTENCE
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, Durability

if TYPE_CHECKING:
    import torch

    from tests.matrix.examples.conftest import Stack

pytestmark = pytest.mark.timeout(420)

_ROOT = Path(__file__).parents[3]
_TOKENS = 24


def _finish(process: subprocess.Popen[str], seconds: float = 180) -> list[str]:
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        output, errors = process.communicate()
    assert process.returncode == 0, (output, errors[-3000:])
    return output.splitlines()


def _ask_vllm(stack: Stack, prompt: str) -> str:
    body = {"model": "model", "prompt": prompt, "max_tokens": _TOKENS, "temperature": 0}
    request = urllib.request.Request(
        f"{stack.url}/v1/completions",
        json.dumps({**body, "ignore_eos": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(json.load(answer)["choices"][0]["text"])


def _ask_transformers(tokenizer_of: Path, weights: Path, prompt: str) -> str:
    import torch
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, Qwen2ForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_of)
    model = Qwen2ForCausalLM.from_pretrained(tokenizer_of)
    pulled: dict[str, torch.Tensor] = {}
    for file in weights.glob("*.safetensors"):
        pulled |= load_file(file)
    model.load_state_dict(pulled, strict=True)
    inputs = tokenizer(prompt, return_tensors="pt").input_ids
    with torch.no_grad():
        for _ in range(_TOKENS):
            newest = model(input_ids=inputs).logits[:, -1].argmax(-1, keepdim=True)
            inputs = torch.cat([inputs, newest], dim=1)
    return str(tokenizer.decode(inputs[0, -_TOKENS:], skip_special_tokens=True))


@pytest.mark.vllm
def test_adding_us_to_vllm_serves_the_proved_checkpoint(stack: Stack) -> None:
    with Client(stack.server) as client:
        assert client.verify().verified
        model = client.status().models[0]
    assert model.live_version == 1
    assert _ask_vllm(stack, PROMPT)


@pytest.fixture(name="server")
def _server() -> Iterator[WeightSyncServer]:
    # Short: unix sockets allow 107 bytes.
    folder = Path(tempfile.mkdtemp(prefix="wse"))
    server = WeightSyncServer(folder / "run", folder / "state", flags=("--same-host",))
    server.start()
    yield server
    server.stop()
    shutil.rmtree(folder, ignore_errors=True)


def _trained_whole(ranks: int, steps: int) -> dict[str, torch.Tensor]:
    """Return what the ranks of the FSDP2 example train, trained in this process without them."""
    import torch

    model = fsdp2.make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(steps):
        for rank in range(ranks):
            rows = fsdp2.make_rows(rank)
            (model(input_ids=rows, labels=rows).loss / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def test_ranks_of_fsdp2_push_the_model_that_they_train(server: WeightSyncServer) -> None:
    import torch

    ranks, steps = 2, 3
    torchrun = Path(sys.executable).with_name("torchrun")
    command = [str(torchrun), "--standalone", "--nproc-per-node", str(ranks), "examples/fsdp2.py"]
    process = subprocess.Popen(
        [*command, "--address", server.address, "--steps", str(steps)],
        cwd=_ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = _finish(process)
    assert [line.partition(":")[0] for line in lines] == [f"step {n + 1}" for n in range(steps)]
    assert len({line.rpartition("version ")[2] for line in lines}) == steps
    with Client(server.address) as client:
        for step, line in enumerate(lines, 1):
            version = int(line.rpartition("version ")[2])
            pushed = {tensor.name: tensor.torch().clone() for tensor in client.tensors(version)}
            trained = _trained_whole(ranks, step)
            assert pushed.keys() == trained.keys()
            for name, tensor in pushed.items():
                # A step changes a value by about 1e-3, the order of a sum by far less.
                torch.testing.assert_close(tensor, trained[name], rtol=0, atol=1e-4, msg=name)
        versions = [v for v in client.versions() if v.durability == Durability.COMMITTED]
    assert [v.metadata["step"] for v in versions] == ["3", "2", "1"]


def test_the_training_loop_is_ten_lines() -> None:
    function = ast.parse(inspect.getsource(train_and_push.train)).body[0]
    assert isinstance(function, ast.FunctionDef)
    first, last = function.body[1].lineno, function.body[-1].end_lineno
    assert last is not None
    assert last - first + 1 <= 10


@pytest.mark.vllm
def test_a_trainer_pushes_and_a_generator_applies(stack: Stack, tmp_path: Path) -> None:
    generator = stack.python(
        "generate_and_apply.py", "--vllm", stack.url, "--prompt", PROMPT, "--versions", "2"
    )
    try:
        assert generator.stdout is not None
        assert "watching" in generator.stdout.readline()
        trainer = stack.python(
            "train_and_push.py",
            *("--model", str(stack.model), "--text", PROMPT + SENTENCE, "--steps", "10"),
        )
        pushed = _finish(trainer)
        applied = _finish(generator)
    finally:
        generator.kill()
    assert [line.split(":")[0] for line in pushed] == ["step 5", "step 10"]
    assert len(applied) == 2, applied
    assert all("paused" in line and "says" in line for line in applied)
    with Client(stack.server) as client:
        versions = [v for v in client.versions() if v.durability == Durability.COMMITTED]
        proof = client.verify(versions[0].version)
        client.pull(tmp_path / "weights", versions[0].version)
    assert versions[0].metadata["step"] == "10"
    assert proof.verified, proof
    assert _ask_vllm(stack, PROMPT) == _ask_transformers(stack.model, tmp_path / "weights", PROMPT)
