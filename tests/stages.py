"""Runs a stage of the tests, and ends with what failed and what this machine could not run.

python -m tests.stages STAGE [PYTEST ARGUMENTS]

Every part of the stage runs, also after one that failed. Paths among the arguments choose tests of
the stage. Where the time went is written to build/stages/STAGE.json, see tests/support/durations.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["STAGES", "main"]

ROOT = Path(__file__).parents[1]
_RECORDS = ROOT / "build" / "stages"
#: What pytest answers when it selects nothing.
_NO_TESTS = 5
_NOTHING = "no test was run"
#: Options of pytest whose value is the next word.
_WITH_VALUE = frozenset({"-k", "-m", "-o", "-p", "-c", "-n", "-W"})
#: What some tests need beside Python, and the Debian package that has it.
_PROGRAMS = {
    "cc": "gcc",
    "chromium": "chromium",
    "curl": "curl",
    "docker-compose": "docker-compose",
    "etcd": "etcd-server",
    "etcdctl": "etcd-client",
    "git": "git",
    "ip": "iproute2",
    "kubectl": "kubernetes-client",
    "npm": "npm",
    "promtool": "prometheus",
}
#: Unit tests of what can be taken away from the product, and that all else works without it.
_EXTENSIONS = (
    "tests/unit/benchmarks",
    "tests/unit/client/integrations",
    "tests/unit/client/trainer",
    "tests/unit/server/extensions",
    "tests/unit/server/http",
    "tests/unit/test_extensions.py",
    "tests/unit/vllm/extensions",
)
#: Unit tests of fleets: their model, and members in one process.
_FLEETS = (
    "tests/unit/server/coordination",
    "tests/unit/server/fleet",
    "tests/unit/server/fleet_host",
)
#: Examples with a real vLLM each, and benchmarks in small.
_COMPUTING = ("tests/matrix/examples", "tests/matrix/benchmarks")


@dataclass(frozen=True)
class Part:
    """Tests that one run of pytest takes.

    Attributes:
        paths: Folders and modules.
        per_core: Modules at a time for each core: one where tests compute, up to three where they
            wait for other processes and timers.
        but: Folders and modules below `paths` that it leaves out.
    """

    paths: tuple[str, ...]
    per_core: int = 1
    but: tuple[str, ...] = ()


#: What `make STAGE` and CI run, in the order of CI.
STAGES: dict[str, tuple[Part, ...]] = {
    "test": (
        Part(("tests/unit", "tests/planted"), per_core=2, but=_EXTENSIONS + _FLEETS),
        Part(("tests/main",), per_core=3),
    ),
    "test-extensions": (Part(_EXTENSIONS), Part(("tests/extensions",), per_core=2)),
    "test-faults": (Part(("tests/faults", "tests/fuzz"), per_core=3),),
    "test-fleet": (Part((*_FLEETS, "tests/fleet"), per_core=3),),
    "test-vllm": (Part(("tests/vllm",)),),
    "test-matrix": (
        Part(("tests/matrix", "tests/deploy"), per_core=3, but=_COMPUTING),
        Part(_COMPUTING),
    ),
}


@dataclass
class _Seen:
    """What the parts of a stage came to."""

    tests: dict[str, dict[str, Any]] = field(default_factory=dict)
    broken: list[str] = field(default_factory=list)

    def outcomes(self) -> Counter[str]:
        return Counter(test["outcome"] for test in self.tests.values())


def _inside(path: str, folders: tuple[str, ...]) -> bool:
    return any(Path(path).is_relative_to(folder) for folder in folders)


def _run_part(stage: str, part: Part, chosen: list[str], options: list[str], seen: _Seen) -> None:
    """Run pytest once and add what it says to `seen`."""
    paths = [
        path
        for path in chosen
        if _inside(path.partition("::")[0], part.paths)
        and not _inside(path.partition("::")[0], part.but)
    ]
    if chosen and not paths:
        return
    if gone := [path for path in part.paths if not (ROOT / path).exists()]:
        seen.broken.append(f"there is no {' and no '.join(gone)}")
        return
    cores = int(os.environ.get("JOBS") or os.cpu_count() or 1)
    record = _RECORDS / f"{stage}.part.json"
    record.unlink(missing_ok=True)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.support.durations"),
            *("--durations-json", str(record), "-m", "not gpu and not battery and not alone"),
            *("-n", str(cores * part.per_core), "--dist", "loadfile", "--no-loadscope-reorder"),
            *(f"--ignore={path}" for path in part.but),
            *(paths or part.paths),
            *options,
        ],
        cwd=ROOT,
        check=False,
    )
    found: dict[str, Any] = {}
    if record.exists():
        found = json.loads(record.read_text())["tests"]
        record.unlink()
    seen.tests |= found
    # What pytest says must be what it wrote down: else something has failed that nobody would see.
    failed = any(test["outcome"] == "failed" for test in found.values())
    agreed = {0: bool(found) and not failed, 1: failed, _NO_TESTS: not found}
    if not agreed.get(done.returncode, False):
        where = " ".join(paths or part.paths)
        seen.broken.append(
            f"pytest ended with {done.returncode} in {where}, and wrote down {len(found)} tests"
        )


def _lint() -> bool:
    print("lint", flush=True)
    return subprocess.run(["make", "lint"], cwd=ROOT, check=False).returncode == 0


def _summarise(stage: str, seen: _Seen, taken_s: float) -> None:
    """Print how many passed, what could not be run and why, and last what failed."""
    outcomes = seen.outcomes()
    counts = ", ".join(f"{outcomes[word]} {word}" for word in ("passed", "failed", "skipped"))
    print(f"\n{stage}: {counts} in {taken_s / 60:.1f} minutes")
    reasons = Counter(t["reason"] for t in seen.tests.values() if t["outcome"] == "skipped")
    if reasons:
        told = "; ".join(f"{count}: {why}" for why, count in reasons.most_common())
        print(f"This machine could not run {reasons.total()} tests ({told})")
    for name, test in seen.tests.items():
        if test["outcome"] == "failed":
            print(f"\nFAILED {name}\n{test['text']}")
    for text in seen.broken:
        print(text)


def _told_apart(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the paths among what is given to pytest, and the rest."""
    chosen: list[str] = []
    options: list[str] = []
    for before, word in zip(["", *arguments], arguments, strict=False):
        path = Path(word.partition("::")[0])
        # What a word after -k or -m selects may be the name of a folder, too.
        is_path = before not in _WITH_VALUE and path.parts[:1] == ("tests",)
        (chosen if is_path and (ROOT / path).exists() else options).append(word)
    return chosen, options


def main(stage: str, arguments: list[str]) -> int:
    """Return 1 where anything failed."""
    # What runs pytest for this process ends with it, whoever ends it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    chosen, options = _told_apart(arguments)
    missing = [f"{name} ({deb})" for name, deb in _PROGRAMS.items() if shutil.which(name) is None]
    if missing:
        print(f"Not installed (Debian package): {', '.join(missing)}. Tests of them are skipped.")
    _RECORDS.mkdir(parents=True, exist_ok=True)
    seen, begin = _Seen(), time.monotonic()
    if stage == "test" and not arguments and not _lint():
        seen.broken.append("lint failed: its findings stand above the tests")
    for part in STAGES[stage]:
        _run_part(stage, part, chosen, options, seen)
    if not seen.tests:
        chose = f" of {' '.join(arguments)}" if arguments else ""
        seen.broken.append(f"no test{chose} was run: is it in this stage?" if chose else _NOTHING)
    taken_s = time.monotonic() - begin
    record = {"run_s": round(taken_s, 1), "tests": dict(sorted(seen.tests.items()))}
    (_RECORDS / f"{stage}.json").write_text(json.dumps(record, indent=1) + "\n")
    _summarise(stage, seen, taken_s)
    return int(bool(seen.broken) or seen.outcomes()["failed"] > 0)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in STAGES:
        sys.exit(f"{__doc__}\nSTAGE is one of {', '.join(STAGES)}")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
