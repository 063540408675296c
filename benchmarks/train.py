"""What deltas of a real training run take, and whether the engine holds the last step to the bit.

A byte-level Qwen2 is trained on this repository's own text, first at 1e-3 until it has learned
something; then it is fine-tuned: AdamW over float32 master weights, of which a bfloat16 copy is
what the loss is computed with, pushed and applied after every step, to a live vLLM that keeps its
weights in bfloat16. For each learning rate, over its steps:

changed_fraction   share of the elements whose bits changed
wire_bytes         what the push sent
ratio_to_dense     a push in full over that
bytes_per_change   what the push sent for each changed element
push_s, pause_s    until the commit was acknowledged; without generation during the apply
bitwise_equal      whether the live parameters after the last step, by a SHA-256 of all of them,
                   are those that vLLM itself reloads from a checkpoint of the trainer's weights
full_pushes        steps that were pushed in full; the first of each run is, and counts nowhere else
rows               changed_fraction and wire_bytes of each step
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from benchmarks import report
from benchmarks.apply_engine import Order, order_json
from weightsync_client import Client, PushKind, PushResult

__all__ = ["main"]

_RATES = ("1e-6", "1e-5")
_WARM_RATE = 1e-3
_BATCH, _LENGTH = 4, 128
_LIMIT_S = 300


class _Trainer:
    """A small language model with float32 masters, and the bfloat16 weights that are pushed."""

    def __init__(self, *, hidden: int, layers: int) -> None:
        import torch
        from transformers import Qwen2Config, Qwen2ForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=256,
            hidden_size=hidden,
            intermediate_size=hidden * 8 // 3,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=2,
            max_position_embeddings=512,
            tie_word_embeddings=False,
            dtype="bfloat16",
        )
        # It computes in float32 with bfloat16 values: a processor without instructions for
        # bfloat16 takes many times as long to compute in it.
        self.model = Qwen2ForCausalLM(config).float()
        self.masters = {n: p.detach().clone() for n, p in self.model.named_parameters()}
        self._text = torch.frombuffer(bytearray(_corpus()), dtype=torch.uint8).long()
        self._generator = torch.Generator().manual_seed(1)
        self._round()

    def _round(self) -> None:
        import torch

        self.weights = {n: m.to(torch.bfloat16) for n, m in self.masters.items()}
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self.weights[name])

    def run(self, rate: float, steps: int) -> Iterator[float]:
        """Train; yields the loss after each step."""
        import torch

        optimizer = torch.optim.AdamW(list(self.masters.values()), lr=rate)
        for _ in range(steps):
            starts = torch.randint(
                0, len(self._text) - _LENGTH, (_BATCH,), generator=self._generator
            )
            batch = torch.stack([self._text[at : at + _LENGTH] for at in starts.tolist()])
            loss = self.model(input_ids=batch, labels=batch).loss
            loss.backward()
            for name, parameter in self.model.named_parameters():
                self.masters[name].grad, parameter.grad = parameter.grad, None
            optimizer.step()
            self._round()
            yield loss.item()

    def save(self, directory: Path) -> Path:
        """Write the pushed weights as a checkpoint."""
        import torch

        self.model.to(torch.bfloat16).save_pretrained(directory)
        self.model.float()
        return directory


def _corpus() -> bytes:
    root = Path(__file__).resolve().parents[1]
    files = [*root.glob("*.md"), *root.glob("docs/*.md"), *root.glob("weightsync/**/*.py")]
    return b"\n".join(path.read_bytes() for path in sorted(files))


class _Engine:
    """The process of `benchmarks.train_engine`."""

    def __init__(self, stdin: IO[bytes], stdout: IO[bytes]) -> None:
        self._stdin = stdin
        self._stdout = stdout

    def answer(self, event: str) -> dict[str, Any]:
        """Return the next answer; vLLM prints on standard output too."""
        for line in self._stdout:
            with contextlib.suppress(ValueError):
                told: dict[str, Any] = json.loads(line)
                if told.get("event") == event:
                    return told
        msg = f"the engine ended before it told {event!r}"
        raise RuntimeError(msg)

    def digest(self, checkpoint: Path | None = None) -> str:
        """Return the digest of the live parameters, after a reload of a checkpoint if given."""
        self._stdin.write(f"{checkpoint or ''}\n".encode())
        self._stdin.flush()
        return str(self.answer("digest")["digest"])


@contextlib.contextmanager
def _engine(folder: Path, base: Path) -> Iterator[_Engine]:
    order = Order(
        str(folder), str(base), "", "", plain=True, rounds=0, requests=0, dtype="bfloat16"
    )
    command = [sys.executable, "-m", "benchmarks.train_engine", order_json(order)]
    log = folder / "engine.log"
    with log.open("wb") as errors:
        child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
        )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        engine = _Engine(child.stdin, child.stdout)
        try:
            engine.answer("serving")
        except RuntimeError as error:
            sys.exit(f"{error}:\n{log.read_text(errors='replace')[-3000:]}")
        yield engine
    finally:
        child.stdin.close()
        try:
            child.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            child.wait()
        child.stdout.close()


def _measure(
    trainer: _Trainer, engine: _Engine, folder: Path, rate: str, steps: int
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Fine-tune at one rate; returns samples and facts."""
    samples: dict[str, list[float]] = {"pause_s": []}
    results: list[PushResult] = []
    losses = []
    with Client(f"unix:{folder}/push.sock") as client:
        for loss in trainer.run(float(rate), steps):
            losses.append(loss)
            pushed = client.push(trainer.weights, metadata={"run_id": f"rate-{rate}"})
            report_ = client.apply(pushed.version, cache="keep")
            results.append(pushed)
            samples["pause_s"].append(report_.phases.paused_total_s)
        proved = client.verify().verified
    deltas = [result for result in results if result.kind is PushKind.DELTA]
    changes = [(result.changed_fraction or 0.0, result) for result in deltas]
    elements = sum(weight.numel() for weight in trainer.weights.values())
    samples |= {
        "changed_fraction": [fraction for fraction, _ in changes],
        "wire_bytes": [result.sent_bytes for result in deltas],
        "ratio_to_dense": [result.dense_bytes / result.sent_bytes for result in deltas],
        "bytes_per_change": [r.sent_bytes / (f * elements) for f, r in changes if f],
        "push_s": [result.seconds for result in deltas],
    }
    live = engine.digest()
    reloaded = engine.digest(trainer.save(folder / f"after-{rate}"))
    facts = {
        "bitwise_equal": live == reloaded and proved,
        "live_digest": live,
        "full_pushes": len(results) - len(deltas),
        "loss": [round(losses[0], 4), round(losses[-1], 4)],
        "rows": [
            {"changed_fraction": float(f"{fraction:.4g}"), "wire_bytes": result.sent_bytes}
            for fraction, result in changes
        ],
    }
    return {name: values for name, values in samples.items() if values}, facts


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--steps", type=int, default=50, help="steps at each rate (default 50)")
    parser.add_argument("--warm-steps", type=int, default=60, help="steps before (default 60)")
    parser.add_argument("--hidden", type=int, default=384, help="width, n x 128 (default 384)")
    parser.add_argument("--layers", type=int, default=6, help="layers (default 6)")
    options = parser.parse_args()
    trainer = _Trainer(hidden=options.hidden, layers=options.layers)
    for _ in trainer.run(_WARM_RATE, options.warm_steps):
        pass
    samples: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="ws-bench-") as name:
        folder = Path(name)
        with _engine(folder, trainer.save(folder / "base")) as engine:
            before = engine.digest()
            for rate in _RATES:
                taken, told = _measure(trainer, engine, folder, rate, options.steps)
                # A digest that never changes would prove nothing.
                digest = told.pop("live_digest")
                told["bitwise_equal"] &= digest != before
                before = digest
                samples |= {f"{what}_{rate}": values for what, values in taken.items()}
                facts |= {f"{what}_{rate}": value for what, value in told.items()}
    facts["bitwise_equal"] = all(facts[f"bitwise_equal_{rate}"] for rate in _RATES)
    parameters = {
        "parameters": sum(weight.numel() for weight in trainer.weights.values()),
        "steps": options.steps,
        "warm_steps": options.warm_steps,
        "batch": [_BATCH, _LENGTH],
        "rates": list(_RATES),
    }
    report.emit("train", parameters, samples, facts, as_json=options.json)


if __name__ == "__main__":
    main()
