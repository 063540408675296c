"""Watch a vLLM learn from a request while it answers others.

Starts vLLM on the CPU with our plugins and weightsync-server with a trainer, which works in vLLM's
own memory. A request to vLLM's port, `POST /v1/weightsync/train`, has the model learn a sentence;
a client generates all the time. What was learned is written as a checkpoint, and a vLLM that knows
nothing of us loads it and answers the same. Ends by itself within three minutes: with status 0 if
it does, else with 1.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from rich.console import Console

from examples.demo.generator import Generator, complete
from examples.demo.model import PROMPT, SENTENCE, make_model
from examples.demo.processes import (
    Processes,
    ProcessesError,
    exit_on_signals,
    free_port,
    short_folder,
)
from examples.train_demo.requests import healthy, post, train
from examples.train_demo.services import Services, start_stock_vllm
from weightsync_client import Access, Client, ClientError, EngineState, TrainerState

#: Longest wait for a vLLM, which takes 20 to 40 s where nothing else runs.
_START_S = 240.0
#: At which loss the sentence is known by heart.
_LEARNED = 0.05


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--steps", type=int, default=60, help="most steps (default 60)")
    steps = parser.parse_args().steps
    exit_on_signals()
    console = Console(highlight=False, markup=False, soft_wrap=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ws-train-", dir=short_folder()) as folder:
            return _run(Path(folder), console, steps)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except (ProcessesError, ClientError) as error:
        console.print(str(error), style="red")
        return 1


def _run(folder: Path, console: Console, steps: int) -> int:
    services = Services(folder)
    with Processes(folder) as processes:
        console.print("Making a Qwen2 model with random weights")
        model = make_model(folder / "model")
        services.start_engine(processes, model)
        services.start_server(processes)
        console.print("Starting vLLM, weightsync-server and its trainer (about 30 s)")
        with Client(services.address, access=Access(token=services.token)) as client:
            processes.wait(lambda: _ready(client), "the trainer", time.monotonic() + _START_S)
        before = complete(services.port, PROMPT)
        console.print(f"Before: {PROMPT!r} is answered {before!r}")
        with Generator(services.port, PROMPT) as generator:
            _train(services, generator, console, steps)
        if generator.error is not None:
            msg = f"the client lost vLLM: {generator.error}"
            raise ProcessesError(msg)
        after = complete(services.port, PROMPT)
        console.print(f"After: {PROMPT!r} is answered {after!r}")
        console.print(f"{generator.tokens} tokens were generated meanwhile")
        done = post(services.port, "/v1/weightsync/checkpoint", services.token, {"folder": "one"})
    console.print(f"Version {done['version']} is a folder; a fresh vLLM starts on it (about 30 s)")
    again = _answer_of_fresh(folder, Path(done["path"]))
    console.print(f"Fresh: {PROMPT!r} is answered {again!r}")
    if before == after or after != SENTENCE or again != after:
        console.print("Not learned, or not kept", style="red")
        return 1
    console.print("Learned while serving, and kept: the fresh vLLM answers the same.")
    return 0


def _ready(client: Client) -> bool:
    try:
        engine = client.status().models[0].engine
        return (
            engine.state is EngineState.SERVING
            and client.train_status().state is TrainerState.READY
        )
    except ClientError:
        return False


def _train(services: Services, generator: Generator, console: Console, steps: int) -> None:
    request = {
        "examples": [{"prompt": PROMPT, "completion": SENTENCE}],
        "steps": steps,
        "learning_rate": 1e-3,
        "until_loss": _LEARNED,
    }
    generator.begin()
    for event in train(services.port, services.token, request):
        if event["event"] == "step":
            gap_ms = generator.longest_gap() * 1e3
            console.print(
                f"step {event['step']:>3}  loss {event['loss']:.4f}  version {event['version']:>3}"
                f"  longest gap {gap_ms:6.1f} ms  {generator.text!r}"
            )
            generator.begin()
        else:
            console.print(f"job {event['job_id']}: {event['event']}")


def _answer_of_fresh(folder: Path, checkpoint: Path) -> str:
    port = free_port()
    with Processes(folder) as processes:
        start_stock_vllm(processes, checkpoint, port)
        processes.wait(lambda: healthy(port), "the fresh vLLM", time.monotonic() + _START_S)
        return complete(port, PROMPT)


if __name__ == "__main__":
    sys.exit(main())
