"""A trainer for `weightsync-server --trainer examples.serve_and_train:Tuner`.

It fine-tunes the model that vLLM serves, with Adam, on texts that requests bring:

    weightsync train --request '{"examples": [{"prompt": "Tell me:", "completion": " a story."}]}'

The model is built over vLLM's own memory, so that no second copy of it is loaded; vLLM stands still
only while a step is written. Fields of a request: `examples`, each with `prompt` and `completion`;
`steps` (default 20), `learning_rate` (default 1e-4) and `until_loss` (default 0: all steps).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from weightsync_client.trainer import Progress

if TYPE_CHECKING:
    import threading
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from weightsync_client.attach import Attached

__all__ = ["Tuner"]

_STATE = "adam.pt"
_FIELDS = {"examples", "steps", "learning_rate", "until_loss"}


class Tuner:
    """Teaches the live model texts."""

    def setup(self, attached: Attached) -> None:
        """Build the model over the live parameters: nothing is copied, nothing is trained yet."""
        self._attached = attached
        dtype = next(iter(attached.values())).dtype
        config = AutoConfig.from_pretrained(attached.checkpoint)
        with torch.device("meta"):
            self._model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        attached.load_into(self._model)
        self._tokenizer = AutoTokenizer.from_pretrained(attached.checkpoint)
        self._live = list(self._model.parameters())
        self._masters: list[torch.nn.Parameter] = []
        self._adam: torch.optim.AdamW | None = None

    def train(self, request: Mapping[str, Any], cancelled: threading.Event) -> Iterator[Progress]:
        """Do up to `steps` steps, each of which is a version that is served from then on."""
        if unknown := request.keys() - _FIELDS:
            msg = f"{min(unknown)!r} is no field of a request; use {', '.join(sorted(_FIELDS))}"
            raise ValueError(msg)
        batch = [self._tokens(example) for example in request["examples"]]
        adam = self._adam or self._begin()
        for group in adam.param_groups:
            group["lr"] = float(request.get("learning_rate", 1e-4))
        for step in range(1, int(request.get("steps", 20)) + 1):
            if cancelled.is_set():
                return
            # vLLM answers meanwhile: this reads the live parameters and writes none.
            loss = self._gradients(batch)
            with self._attached.transaction():
                self._write(adam)
            yield Progress(step, loss, tokens=sum(tokens.numel() for tokens, _ in batch))
            if loss <= float(request.get("until_loss", 0.0)):
                return

    def save_state(self, folder: Path) -> None:
        """Keep what Adam knows of the parameters, and the masters, beside a version."""
        adam = self._adam or self._begin()
        masters = [master.detach() for master, live in self._pairs() if master is not live]
        torch.save({"adam": adam.state_dict(), "masters": masters}, folder / _STATE)

    def load_state(self, folder: Path) -> None:
        """Go on where the trainer was when it made the version that is live."""
        saved = torch.load(folder / _STATE, weights_only=True)
        adam = self._begin()
        own = [master for master, live in self._pairs() if master is not live]
        for master, value in zip(own, saved["masters"], strict=True):
            master.data.copy_(value)
        adam.load_state_dict(saved["adam"])

    def _begin(self) -> torch.optim.AdamW:
        """Return a fresh Adam for what is live now.

        A step of Adam is smaller than what bfloat16 can add to most weights: so parameters of fewer
        bits have masters in float32, which are moved in their place.
        """
        self._masters = [
            live if live.dtype is torch.float32 else torch.nn.Parameter(live.detach().float())
            for live in self._live
        ]
        self._adam = torch.optim.AdamW(self._masters)
        return self._adam

    def _pairs(self) -> Iterator[tuple[torch.nn.Parameter, torch.nn.Parameter]]:
        return zip(self._masters, self._live, strict=True)

    def _gradients(self, batch: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
        """Leave the gradient of the mean loss in the live parameters' `grad`; return that loss."""
        self._model.zero_grad()
        total = 0.0
        for tokens, labels in batch:
            loss = self._model(input_ids=tokens, labels=labels).loss / len(batch)
            loss.backward()
            total += loss.item()
        return total

    def _write(self, adam: torch.optim.AdamW) -> None:
        for master, live in self._pairs():
            if master is not live and live.grad is not None:
                master.grad = live.grad.float()
        adam.step()
        with torch.no_grad():
            for master, live in self._pairs():
                if master is not live:
                    live.copy_(master)

    def _tokens(self, example: Mapping[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of an example, and as labels those of its completion."""
        prompt = self._tokenizer(example["prompt"]).input_ids
        whole = self._tokenizer(example["prompt"] + example["completion"]).input_ids
        device = self._live[0].device
        tokens = torch.tensor([[*whole, self._tokenizer.eos_token_id]], device=device)
        labels = tokens.clone()
        labels[:, : len(prompt)] = -100
        return tokens, labels
