"""Fuzzes the parsers and the request stream: python -m tests.fuzz --seconds 600 [--seed 1].

Ends with one line of JSON and, where something was found, status 1. What was found lies in the work
folder: crash-* files replay with `python -m tests.fuzz.parsers TARGET figures FILE`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests.fuzz.limits import MAX_BYTES
from tests.fuzz.seeds import CORPUS
from tests.fuzz.stream import Hostile, conversations, play

#: Part of the time that each parser gets; the streams get the rest.
_SHARES = {"header": 0.3, "layout": 0.15, "delta": 0.25, "message": 0.1}
_DONE = re.compile(r"DONE +cov: (\d+)")


def _parser(target: str, seconds: int, number: int, folder: Path) -> dict[str, Any]:
    """Fuzz one parser in a process of its own; return its figures."""
    work, figures = folder / target, folder / f"{target}.json"
    work.mkdir(parents=True, exist_ok=True)
    figures.write_text("{}")
    flags = [
        f"-max_total_time={seconds}",
        f"-max_len={MAX_BYTES}",
        f"-seed={number}",
        f"-artifact_prefix={folder}/{target}-",
        str(work),
        str(CORPUS / target),
    ]
    command = [sys.executable, "-m", "tests.fuzz.parsers", target, str(figures), *flags]
    done = subprocess.run(command, stderr=subprocess.PIPE, check=False)
    told = done.stderr.decode(errors="replace")
    if done.returncode:
        sys.stderr.write(told[-4000:])
    covered = _DONE.search(told)
    found: dict[str, Any] = {
        "failed": bool(done.returncode),
        "coverage": int(covered[1]) if covered else 0,
    }
    found |= json.loads(figures.read_text())
    return found


def _streams(seconds: float, number: int) -> dict[str, Any]:
    """Let hostile callers talk to an ingest until the time is over."""
    found = {"failed": False, "inputs": 0, "versions": 0}
    end = time.monotonic() + seconds

    def talk(callers: list[Hostile]) -> None:
        if time.monotonic() < end:
            found["inputs"] += 1
            found["versions"] += asyncio.run(play(callers)) - 1

    while time.monotonic() < end and not found["failed"]:
        number += 1
        run = settings(
            max_examples=200,
            deadline=None,
            database=None,
            phases=[Phase.generate, Phase.shrink],
            suppress_health_check=list(HealthCheck),
        )(seed(number)(given(conversations)(talk)))
        try:
            run()
        except Exception:  # noqa: BLE001 - whatever it was, it was found and is shown
            traceback.print_exc()
            found |= {"failed": True, "seed": number}
    return found


def main() -> int:
    """Return 1 where something was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0, help="0: any")
    parser.add_argument("--work", type=Path, default=Path("build/fuzz"), help="kept between runs")
    options = parser.parse_args()
    number = options.seed or random.randrange(1, 1 << 31)
    print(f"seed {number}", flush=True)
    figures = {
        target: _parser(target, max(1, int(options.seconds * share)), number, options.work)
        for target, share in _SHARES.items()
    }
    figures["stream"] = _streams(options.seconds * (1 - sum(_SHARES.values())), number)
    failed = any(each["failed"] for each in figures.values())
    print(json.dumps({"fuzz": "failed" if failed else "passed", "seed": number, **figures}))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
