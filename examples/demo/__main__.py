"""Watch a model learn a sentence while vLLM generates with it.

Starts vLLM on the CPU with our plugins, weightsync-server beside it, a PyTorch trainer that pushes
and applies a version every few steps, and a client that generates all the time. Ends by itself, in
two to three minutes where nothing else runs: with status 0 as soon as the model answers with the
sentence, with 1 if it has not learned that within the longest training.
"""

from __future__ import annotations

import argparse
import json
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from rich.console import Console

from examples.demo.generator import Generator, complete
from examples.demo.model import PROMPT, SENTENCE, make_model
from examples.demo.processes import (
    Processes,
    ProcessesError,
    exit_on_signals,
    free_port,
    give_way,
    short_folder,
    vllm_command,
)
from examples.demo.table import Row, View
from weightsync_client import Client, ClientError, EngineState

#: Longest wait for vLLM, which takes 20 to 40 s where nothing else runs.
_START_S = 600.0
#: Longest training. It takes less than 100 s where nothing else runs, and ends once the sentence is
#: known; on a machine that others keep busy, each step may take several times as long.
_TRAIN_S = 600.0
#: Longest wait for one more completion at the end.
_COMPLETION_S = 5.0


def main() -> int:
    """Run the demo and return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.demo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--train-seconds",
        type=float,
        default=_TRAIN_S,
        help=f"longest training (default {_TRAIN_S:g})",
    )
    train_s = parser.parse_args().train_seconds
    exit_on_signals()
    console = Console()
    try:
        with tempfile.TemporaryDirectory(prefix="ws-demo-", dir=short_folder()) as folder:
            learned, text = _run(Path(folder), console, train_s)
    except KeyboardInterrupt:
        console.print("stopped")
        return 130
    except (ProcessesError, ClientError) as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 1
    if not learned:
        console.print(f"Not learned: the model answers {text!r}", style="red", markup=False)
        return 1
    console.print("Learned: the model answers with the sentence, and it never stopped to reload.")
    return 0


def _run(folder: Path, console: Console, train_s: float) -> tuple[bool, str]:
    port, address = free_port(), f"unix:{folder}/push.sock"
    with View(console, SENTENCE) as view, Processes(folder) as processes:
        view.status("Making a Qwen2 model with random weights")
        model = make_model(folder / "model", dtype="bfloat16")
        _start_engine(processes, folder, model, port)
        _start_server(processes, folder, address)
        view.status("Starting vLLM and weightsync-server (about 30 s)")
        with Client(address) as client:
            end = time.monotonic() + _START_S
            processes.wait(lambda: _serving(client), "vLLM", end)
            complete(port, PROMPT)  # The first answer of a fresh vLLM takes seconds.
            view.status("vLLM serves; the trainer starts")
            with Generator(port, PROMPT) as generator:
                _train(processes, _trainer_command(model, address, train_s), generator, view)
            text = complete(port, PROMPT)
            proof = client.verify()
            view.status(
                f"{generator.tokens} tokens generated meanwhile; version {proof.version} "
                f"{'proved' if proof.verified else 'NOT PROVED'} from the live parameters"
            )
    return text == SENTENCE and proof.verified, text


def _start_engine(processes: Processes, folder: Path, model: Path, port: int) -> None:
    variables = {
        "VLLM_PLUGINS": "weightsync",
        "WEIGHTSYNC_ENGINE_SOCKET": f"unix:{folder}/engine.sock",
        # A CPU engine repacks its weights unless told not to; a GPU engine needs no such word.
        "WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
        # One core for a model this small; the trainer needs the other.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    vllm = processes.start("vllm", vllm_command(model, port), variables)
    # Two of its processes wait for each other without ever sleeping, a core each: on two cores a
    # push would take seconds, of which it works for 50 ms.
    give_way(vllm)


def _start_server(processes: Processes, folder: Path, address: str) -> None:
    command = [
        *(sys.executable, "-m", "weightsync_server.cli", "--name", "demo"),
        *("--engine", f"unix:{folder}/engine.sock", "--listen", address, "--metrics", ""),
        *("--run-dir", str(folder), "--state-dir", str(folder / "state")),
        *("--drain-timeout-s", "2"),
    ]
    processes.start("weightsync-server", command)


def _trainer_command(model: Path, address: str, seconds: float) -> list[str]:
    program = (sys.executable, "-m", "examples.demo.trainer")
    return [*program, "--model", str(model), "--server", address, "--seconds", f"{seconds:.0f}"]


def _serving(client: Client) -> bool:
    try:
        return client.status().models[0].engine.state == EngineState.SERVING
    except ClientError:
        return False


def _train(processes: Processes, command: list[str], generator: Generator, view: View) -> None:
    trainer = processes.start("trainer", command, {"HF_HUB_OFFLINE": "1"}, piped=True)
    assert trainer.stdout is not None
    events = _read_events(trainer.stdout)
    row: Row | None = None
    while True:
        processes.check()
        if generator.error is not None:
            msg = f"the client lost vLLM: {generator.error}"
            raise ProcessesError(msg)
        try:
            event = events.get(timeout=0.1)
        except queue.Empty:
            event = {"event": "none"}
        if event["event"] == "done":
            generator.wait_whole(_COMPLETION_S)
        if row is not None:
            row.gap_s, row.text = generator.longest_gap(), generator.text
        match event["event"]:
            case "push":
                row = None
                generator.begin()
            case "live":
                row = Row(
                    event["version"],
                    event["loss"],
                    event["sent"],
                    event["dense"],
                    event["push_s"],
                    event["pause_s"],
                )
                view.add(row)
            case "done":
                return


def _read_events(pipe: IO[bytes]) -> queue.SimpleQueue[dict[str, Any]]:
    events: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()

    def read() -> None:
        for line in pipe:
            events.put(json.loads(line))

    threading.Thread(target=read, name="trainer-events", daemon=True).start()
    return events


if __name__ == "__main__":
    sys.exit(main())
