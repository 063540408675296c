"""Measures one part on this host and prints one JSON line.

Parts: limits (what the device and its bus do), pause (a pause with nothing in it), peers (vLLM's
reload and ipc, and torchforge's way), nccl (vLLM's nccl backend, two GPUs), apply and exact (ours,
caches kept and computed again), durable and compiled (apply's times with a store on the disk of
build/bench, and with vLLM's default compilation), apply2 (ours with TP 2, two GPUs), push (ours,
without an engine), colocated (a trainer on the engine's GPU, and one in the engine's own memory),
models (every kind of model, one after the other; model: one of them), moe30 (a mixture of experts
of 31 GB in block fp8).
Every part but limits, models and model measures the limits too, and every figure that has a limit
or a peer stands beside it under "beside". What failed stands under "errors", and the other figures
are there.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import signal
import sys
import traceback

from benchmarks import report
from benchmarks.gpu.cleanup import adopt_orphans, end_children, watchdog
from benchmarks.gpu.kinds import KINDS
from benchmarks.gpu.parts import PARTS, Order
from benchmarks.gpu.results import Results
from benchmarks.gpu.shape import FULL, SMALL

__all__ = ["main"]

_BUDGET_S = 450.0
#: 657 s on an H200: vLLM starts twice with 31 GB, loaders load them again and again, so does vLLM.
_BUDGETS = {"moe30": 900.0}
#: Stopping vLLM takes a while.
_OVERTIME_S = 40.0


def main() -> None:
    """Read the command line, measure and print."""
    options = _parser().parse_args()
    budget_s = options.budget_s or _BUDGETS.get(options.part, _BUDGET_S)
    # vLLM and its libraries write to standard output; the line keeps it for itself.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    adopt_orphans()
    results = Results(options.part, budget_s, out)
    order = Order(
        shape=SMALL if options.small else FULL,
        device=options.device or _device(),
        rounds=options.rounds,
        requests=options.requests,
        executor=options.executor,
        small=options.small,
        kinds=options.kinds,
    )
    _describe(results, order)
    with watchdog(results, budget_s + _OVERTIME_S, as_json=options.json):
        _run(results, order, options.part)
        end_children()
        results.emit(as_json=options.json)
    # Threads of libraries that do not end must not keep this process.
    os._exit(1 if results.errors and not results.samples else 0)


def _run(results: Results, order: Order, part: str) -> None:
    try:
        asyncio.run(PARTS[part](order, results))
    except (Exception, SystemExit, KeyboardInterrupt) as error:  # noqa: BLE001 - told in the line
        traceback.print_exc(file=sys.stderr)
        results.errors.append(f"{part}: {type(error).__name__}: {str(error)[:300]}")


def _parser() -> argparse.ArgumentParser:
    parser = report.arguments(__doc__)
    parser.prog = "python -m benchmarks.gpu"
    parser.add_argument("--part", required=True, choices=list(PARTS))
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--device", choices=["cuda", "cpu"], help="default: cuda where there is")
    parser.add_argument("--rounds", type=int, default=5, help="of each figure (default 5)")
    parser.add_argument("--requests", type=int, default=8, help="running requests (default 8)")
    times = "".join(f", {part}: {seconds:g}" for part, seconds in _BUDGETS.items())
    parser.add_argument(
        "--budget-s", type=float, default=0.0, help=f"time of the part ({_BUDGET_S:g}{times})"
    )
    parser.add_argument(
        "--executor", default="mp", choices=["mp", "uni"], help="of vLLM's workers (default mp)"
    )
    parser.add_argument(
        "--kinds", type=_kinds, default=(), help=f"of models: {','.join(KINDS)} (default all)"
    )
    return parser


def _kinds(text: str) -> tuple[str, ...]:
    found = tuple(text.split(","))
    for name in found:
        if name not in KINDS:
            msg = f"{name} is no kind of model; there are {', '.join(KINDS)}"
            raise argparse.ArgumentTypeError(msg)
    return found


def _device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _describe(results: Results, order: Order) -> None:
    results.parameters |= {
        "device": order.device,
        "rounds": order.rounds,
        "small": order.small,
        "kernel": platform.release(),
    }
    with contextlib.suppress(Exception):
        import torch

        results.parameters["torch"] = torch.__version__
        if order.device == "cuda":
            # Through NVML: a context of our own would take memory from vLLM.
            results.parameters["gpus"] = torch.cuda.device_count()
            results.parameters["gpu"] = _gpu_name()
    with contextlib.suppress(Exception):
        from importlib.metadata import packages_distributions, version

        owner = packages_distributions()["vllm"][0]
        results.parameters["vllm"] = version(owner)


def _gpu_name() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.splitlines()[0].strip()


if __name__ == "__main__":
    main()
