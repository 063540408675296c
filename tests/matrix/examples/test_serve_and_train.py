"""The trainer of the examples, to the bit: against the same steps in a plain loop of PyTorch."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.demo.model import make_model
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, ClientError, Reason, TrainerState

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.timeout(180)

_ROOT = Path(__file__).resolve().parents[3]
_EXAMPLES = [
    {"prompt": "Tell me:", "completion": " a story of weights."},
    {"prompt": "And then:", "completion": " they moved."},
]
_RATE = 3e-5


class _Plain:
    """What the trainer should do, without any of it."""

    def __init__(self, checkpoint: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(checkpoint)
        self.tokenizer = AutoTokenizer.from_pretrained(checkpoint)
        self.live = list(self.model.parameters())
        whole = self.live[0].dtype is torch.float32
        self.masters = self.live if whole else [torch.nn.Parameter(p.float()) for p in self.live]
        self.adam = torch.optim.AdamW(self.masters, lr=_RATE)

    def step(self) -> float:
        self.model.zero_grad()
        loss = torch.zeros(())
        for example in _EXAMPLES:
            prompt = self.tokenizer(example["prompt"]).input_ids
            whole = self.tokenizer(example["prompt"] + example["completion"]).input_ids
            tokens = torch.tensor([[*whole, self.tokenizer.eos_token_id]])
            labels = tokens.clone()
            labels[:, : len(prompt)] = -100
            part = self.model(input_ids=tokens, labels=labels).loss / 2
            part.backward()
            loss = loss + part.detach()
        for master, live in zip(self.masters, self.live, strict=True):
            assert live.grad is not None
            master.grad = live.grad.to(master.dtype)
        self.adam.step()
        with torch.no_grad():
            for master, live in zip(self.masters, self.live, strict=True):
                live.copy_(master)
        return float(loss)


class _Site:
    def __init__(self, folder: Path, dtype: str) -> None:
        self.checkpoint = make_model(folder / "model", dtype=dtype)
        self.server = WeightSyncServer(
            folder / "run",
            folder / "state",
            flags=[
                *("--engine=memory", f"--model={self.checkpoint}", "--slots=3"),
                "--trainer=examples.serve_and_train:Tuner",
            ],
            # With one thread the order of every sum is the same.
            variables={
                "PYTHONPATH": os.pathsep.join(
                    filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
                ),
                "OMP_NUM_THREADS": "1",
                "HF_HUB_OFFLINE": "1",
            },
        )
        self.server.start()
        self.server.wait_serving()
        self.client = Client(self.server.address)
        self.plain = _Plain(self.checkpoint)

    def train(self, steps: int) -> list[float | None]:
        """Return the losses of a job; what is live then is what the plain loop has."""
        ask = {"examples": _EXAMPLES, "steps": steps, "learning_rate": _RATE}
        losses = [one.loss for one in self.client.train(ask)][2:-1]
        assert losses == pytest.approx([self.plain.step() for _ in range(steps)], rel=1e-3)
        self.same()
        return losses

    def same(self) -> None:
        wanted = self.plain.model.state_dict()
        for tensor in self.client.tensors():
            assert torch.equal(tensor.torch(), wanted[tensor.name]), tensor.name

    def kill_trainer(self) -> None:
        os.kill(self.client.train_status().pid, signal.SIGKILL)
        end = time.monotonic() + 60
        while self.client.train_status().restarts == 0:
            assert time.monotonic() < end
            time.sleep(0.05)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=["bfloat16", pytest.param("float32", marks=pytest.mark.battery)])
def site(request: pytest.FixtureRequest) -> Iterator[_Site]:
    with tempfile.TemporaryDirectory(prefix="wse") as name, _one_thread():
        made = _Site(Path(name), request.param)
        try:
            yield made
        finally:
            made.client.close()
            made.server.kill()


def test_its_steps_are_adam_s_wherever_it_goes_on(site: _Site) -> None:
    first = site.train(3)
    assert first[-1] < first[0]  # type: ignore[operator]  # every step of it has a loss
    # A job after it has the same Adam, and so has a process after this one.
    site.train(2)
    site.kill_trainer()
    site.train(2)
    # Gone back, it is the Adam of that version, and makes the same version of it again.
    before = site.client.get_version().content_digest
    site.client.rollback()
    ask = {"examples": _EXAMPLES, "steps": 1, "learning_rate": _RATE}
    list(site.client.train(ask))
    assert site.client.get_version().content_digest == before
    site.same()

    _refuse(site)


def _refuse(site: _Site) -> None:
    """Send what it does not know."""

    def refused(request: dict[str, Any]) -> str:
        with pytest.raises(ClientError) as caught:
            list(site.client.train(request))
        assert caught.value.reason is Reason.TRAINER_FAILED
        return caught.value.message

    assert "'text' is no field of a request" in refused({"text": "x"})
    assert "KeyError" in refused({"examples": [{"prompt": "x"}]})
    assert site.client.train_status().state is TrainerState.READY
    site.same()
