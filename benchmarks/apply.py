"""How long vLLM stands still for new weights: our apply against vLLM's own reload_weights.

A real vLLM (CPU) serves a random-weight Qwen2 of about half a billion parameters (a bfloat16
checkpoint), and requests run all the time, on old keys (cache: keep). In turn a version is pushed
and applied, and vLLM reloads one from a tmpfs directory:

reload_pause_s          pause, reload_weights, resume
pause_s                 ours, from the request to pause until the engine runs, with the proof that
                        the live parameters are the version's; of it, stop_s waits for the step
                        that runs; in the rest, still_s, no token is made: commit_s writes,
                        verify_s proves, resume_s starts again
reload_over_ours        median of the ratios within each pair
bitwise_equal           whether the last applies, a patch and the way back among them, left the same
                        live parameters, by a SHA-256 of all of them, as a reload of each version
token_gap_p50_s         between two tokens of one request while nothing else goes on
max_token_gap_s         longest gap around an apply; spread tells the longest of all rounds
reload_max_token_gap_s  the same around a reload

and in between, with 1 % of the values changed (delta_changed), each written by a patch:

delta_pause_s           ours, for a version that differs from the live one in that; its parts as
                        above, with delta_ before them
delta_over_full_pause   median of the ratios to pause_s within each round
delta_over_full_still   the same of delta_still_s to still_s: without the wait, which a step decides
rollback_pause_s        the way back from it
delta_check_s           from the call until everything was compared, beside generation

with CPU weight repacking off, so that the layout is that of a GPU, and tied embeddings. With suffix
_repacked: a second engine with repacking on, in float32, and an untied model; where ours refuses to
apply there, the figure is null and refusal_repacked holds the sentence. engine_repacks_repacked
tells whether vLLM really repacks there.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.apply_engine import Order, order_json
from benchmarks.checkpoints import make_checkpoint, write_variant

__all__ = ["main"]

_TMPFS = "/dev/shm"  # noqa: S108 - both ways read their weights from memory
_LIMIT_S = 900


def main() -> None:
    """Read the command line, measure and print."""
    parser = report.arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=7, help="rounds (default 7)")
    parser.add_argument("--requests", type=int, default=4, help="running requests (default 4)")
    parser.add_argument(
        "--dtype",
        default="float32",
        choices=["float32", "bfloat16"],
        help="vLLM's --dtype with repacking off (default float32: a processor without bfloat16 "
        "instructions takes so long for a step in bfloat16 that both ways mostly wait for it)",
    )
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the benchmark")
    parser.add_argument("--no-repacked", action="store_true", help="only with repacking off")
    options = parser.parse_args()
    samples: dict[str, list[float]] = {}
    facts: dict[str, Any] = {}
    parameters = {
        "rounds": options.rounds,
        "requests": options.requests,
        "cache": "keep",
        "dtype": options.dtype,
    }
    for suffix, plain in (("", True), ("_repacked", False)):
        if suffix and options.no_repacked:
            continue
        with tempfile.TemporaryDirectory(prefix="ws-bench-", dir=_TMPFS) as folder:
            count = make_checkpoint(Path(folder, "base"), tied=plain, small=options.small)
            parameters[f"parameters{suffix}"] = count
            # vLLM repacks float32 on every processor, bfloat16 only where it computes in it.
            dtype = options.dtype if plain else "float32"
            result = _run(Path(folder), options.rounds, options.requests, dtype, plain=plain)
        samples |= {f"{name}{suffix}": values for name, values in result["samples"].items()}
        facts |= {f"{name}{suffix}": value for name, value in result["facts"].items()}
    report.emit("apply", parameters, samples, facts, as_json=options.json)


def _run(folder: Path, rounds: int, requests: int, dtype: str, *, plain: bool) -> dict[str, Any]:
    """Measure one engine in a process of its own, because the layout is set when vLLM starts."""
    other = folder / "other"
    write_variant(folder / "base", other, 1)
    paths = (str(folder), str(folder / "base"), str(other), str(folder / "near"))
    order = Order(*paths, plain, rounds, requests, dtype)
    log = folder / "engine.log"
    command = [sys.executable, "-m", "benchmarks.apply_engine", order_json(order)]
    with log.open("wb") as errors:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=errors, timeout=_LIMIT_S, check=False
        )
    # vLLM logs on standard output too.
    output = done.stdout.decode(errors="replace").splitlines()
    lines = [line for line in output if line.startswith('{"samples"')]
    if done.returncode != 0 or not lines:
        kept = shutil.copy(log, tempfile.gettempdir())
        end = log.read_text(errors="replace")[-3000:]
        sys.exit(f"the engine failed with status {done.returncode} ({kept}):\n{end}")
    result: dict[str, Any] = json.loads(lines[-1])
    return result


if __name__ == "__main__":
    main()
