"""TRL's own trainer, with its rollouts by a real vLLM that serves each of its steps."""

from __future__ import annotations

import importlib
import os
import re
import statistics
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.matrix.examples.conftest import Stack, running_stack
from tests.support.leftovers import Mark
from weightsync_client import Client, Serving

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(420)

_ROOT = Path(__file__).parents[3]
_STEPS = 12
_LINE = re.compile(r"step (\d+): reward ([\d.]+), version (\d+)")


def _make_model(folder: Path) -> Path:
    subprocess.run(
        [sys.executable, "examples/trl_async_grpo.py", "--init", str(folder)],
        cwd=_ROOT,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
        check=True,
        timeout=120,
    )
    return folder


@pytest.fixture(scope="module", name="stack")
def _stack() -> Iterator[Stack]:
    with running_stack(_make_model, requests=32) as running:
        yield running


@contextmanager
def _served(address: str) -> Iterator[list[int]]:
    """Note each version that becomes live."""
    live: list[int] = []
    client = Client(address)

    def watch() -> None:
        for change in client.watch():
            if change.version.serving is Serving.LIVE and change.version.version not in live:
                live.append(change.version.version)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield live
    finally:
        client.close()
        thread.join(30)
    assert not thread.is_alive()


@pytest.mark.vllm
@pytest.mark.battery
def test_the_reward_rises_while_vllm_serves_each_step(stack: Stack, tmp_path: Path) -> None:
    mark, trained = Mark(), tmp_path / "trained"
    # vLLM's worker spins, and of two threads that wait for each other one waits for its core.
    variables = {**mark.variables, "OMP_NUM_THREADS": "1"}
    options = ("--model", str(stack.model), "--vllm", stack.url, "--save", str(trained))
    with _served(stack.server) as live:
        process = stack.python(
            "trl_async_grpo.py", *options, "--steps", str(_STEPS), variables=variables
        )
        try:
            output, errors = process.communicate(timeout=300)
        finally:
            process.kill()
    assert process.returncode == 0, (output, errors[-3000:])
    # Of TRL's trainer and of the process in which it generates.
    assert mark.left_after(5) == []

    lines = [match.groups() for match in _LINE.finditer(output)]
    steps, rewards, versions = zip(*lines, strict=True)
    assert list(map(int, steps)) == list(range(1, _STEPS + 1))
    # Version 1 is the checkpoint's, 2 what training began with.
    assert list(map(int, versions)) == list(range(3, _STEPS + 3))
    assert live == list(range(1, _STEPS + 3))
    # Random weights give 10 of 39 tokens a digit; what has learned from vLLM's answers gives more.
    began, ended = (statistics.mean(map(float, part)) for part in (rewards[:2], rewards[-3:]))
    assert began < 0.4
    assert ended > began + 0.2

    with Client(stack.server) as client:
        served = client.get_version(0)
        assert served.version == _STEPS + 2
        # TRL counts the transfer before the first step as one.
        assert served.metadata["sync"] == str(_STEPS + 1)
        assert client.verify().verified
        assert client.status().models[0].pushes == ()
        found = {tensor.name: tensor.torch().clone() for tensor in client.tensors(served.version)}
    expected = load_file(trained / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)


def test_attention_without_a_gpu_is_that_of_each_sample_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of TRL's, about what else is installed.
        example = importlib.import_module("examples.trl_async_grpo")
    example.make_model(str(tmp_path))
    monkeypatch.setattr(example.packing, "tree_attention", example._tree_attention)
    example.packing.register_tree_attention()
    packed_model, model = (
        example.Qwen2ForCausalLM.from_pretrained(tmp_path, attn_implementation=attention)
        for attention in (example.packing.TREE_ATTENTION, "sdpa")
    )
    row, samples = example.packing.TreeRow(), ([3, 4, 5, 6, 7], [3, 4, 5, 8], [3, 9], [10, 11, 12])
    for group, tokens in enumerate(samples):
        row.add(_sample(tokens, group))
    packed = row.pack()
    assert packed["input_ids"].numel() < sum(map(len, samples))
    bounds = {name: value for name, value in packed.items() if name.startswith("tree_")}
    bounds["tree_max_seqlen_q"], bounds["tree_max_seqlen_k"] = bounds.pop("tree_max_seqlens")
    with torch.no_grad():
        together = packed_model(
            input_ids=packed["input_ids"][None], position_ids=packed["position_ids"][None], **bounds
        ).logits[0]
        alone = [model(input_ids=torch.tensor([tokens])).logits[0, :-1] for tokens in samples]
    torch.testing.assert_close(together[packed["token_index"]], torch.cat(alone))


def _sample(tokens: list[int], group: int) -> dict[str, Any]:
    trained = np.arange(len(tokens)) > 0
    scores = np.zeros(len(tokens), np.float32)
    return {
        "input_ids": np.array(tokens),
        "completion_mask": trained,
        "old_log_probs": scores,
        "advantage": 1.0,
        "group_id": group,
    }
