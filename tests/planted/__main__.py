"""Plants each bug into a copy of the tree and sees whether the tests notice.

python -m tests.planted [NAME...]     NAME: a part of a plant's name
python -m tests.planted --one-each    the first of every invariant

Prints of each which test caught it. Ends with `N of N caught` and, unless all are, with status 1
and the names of those that were not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tests.planted.plants import copy_tree, plants

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.planted.plants import Plant

__all__ = ["Outcome", "main", "try_plant"]

#: What pytest answers when tests failed; any other answer than 0 means that it could not run them.
_FAILED = 1
#: A line of pytest's summary: the test, with its parameters in brackets, and what it failed with.
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
#: For the tests of one plant, and for those of all when no bug is planted.
_TIMEOUT_S, _ALL_TIMEOUT_S = 600, 3600
#: What stands in the output of a test that was ended, and pytest with it, because it hung.
_HUNG = "+ Timeout +"
_SHOWN = 2000


@dataclass(frozen=True)
class Outcome:
    """What came of one plant.

    Attributes:
        plant: Which.
        by: The first test that failed; empty: the bug was not caught.
        seconds: How long its tests took.
        problem: Why its tests could not be run, if so.
    """

    plant: Plant
    by: str
    seconds: float
    problem: str = ""

    def __str__(self) -> str:
        """Tell a person."""
        told = f"caught by {self.by}" if self.by else f"NOT CAUGHT {self.problem}".rstrip()
        return f"{self.plant.name} in {self.seconds:.0f} s: {told}"

    def record(self) -> dict[str, str | bool | float]:
        """Return what the JSON record tells."""
        return {
            "name": self.plant.name,
            "invariant": self.plant.invariant,
            "caught": bool(self.by),
            "by": self.by,
            "seconds": round(self.seconds, 2),
        }


def _run(tree: Path, tests: Iterable[str], timeout_s: float) -> tuple[int, str]:
    """Run tests in a copy of the tree; return pytest's answer and its output."""
    paths = os.pathsep.join(str(tree / part) for part in ("", "server", "client"))
    rest = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([paths, rest] if rest else [paths]),
        # A plant may leave size and second of a file as they were, by which bytecode is judged.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    # By a thread, because an event loop may drop what a signal raises in one of its callbacks.
    flags = ["-x", "-q", "--tb=line", "--timeout=30", "--timeout-method=thread"]
    flags += ["-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=timeout_s,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")


def try_plant(plant: Plant, tree: Path) -> Outcome:
    """Plant one bug into a copy of the tree, run its tests, and take it out again.

    Raises:
        ValueError: The plant does not fit the tree any more.
    """
    begin = time.monotonic()
    by = problem = ""
    with plant.apply(tree):
        try:
            answer, output = _run(tree, plant.tests, _TIMEOUT_S)
        except subprocess.TimeoutExpired:
            problem = f"(its tests took longer than {_TIMEOUT_S} s)"
        else:
            failure = _FAILURE.search(output)
            if answer == _FAILED and failure is not None:
                by = failure[1]
            elif answer == _FAILED and _HUNG in output:
                by = f"one of {', '.join(plant.tests)}, which hung"
            elif answer:
                problem = f"(pytest could not run: {answer})\n{output[-_SHOWN:]}"
    return Outcome(plant, by, time.monotonic() - begin, problem)


def _make_trees(folder: Path, count: int) -> list[Path]:
    trees = [folder / str(number) for number in range(count)]
    for tree in trees:
        tree.mkdir()
        copy_tree(tree)
    return trees


def _try_all(chosen: Sequence[Plant], trees: Sequence[Path]) -> list[Outcome]:
    """Plant every bug, in whatever tree is free."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def try_one(plant: Plant) -> Outcome:
        tree = free.get()
        try:
            outcome = try_plant(plant, tree)
        finally:
            free.put(tree)
        print(outcome, flush=True)
        return outcome

    with ThreadPoolExecutor(len(trees)) as pool:
        return list(pool.map(try_one, chosen))


def _choose(names: Sequence[str], *, one_each: bool) -> list[Plant]:
    chosen = [plant for plant in plants() if not names or any(n in plant.name for n in names)]
    if one_each:
        chosen = list({plant.invariant: plant for plant in reversed(chosen)}.values())
    return chosen


def main() -> int:
    """Return 0 if every bug was caught."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="a part of a plant's name")
    parser.add_argument("--one-each", action="store_true", help="the first of every invariant")
    parser.add_argument("--jobs", type=int, default=2, help="so many plants at a time; default 2")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to write all outcomes")
    options = parser.parse_args()
    chosen = _choose(options.names, one_each=options.one_each)
    if not chosen:
        print(f"no plant's name contains {' or '.join(options.names)}; see tests/planted/*.toml")
        return 2
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        trees = _make_trees(Path(name), max(1, min(options.jobs, len(chosen))))
        # A test that fails anyway catches nothing.
        tests = sorted({test for plant in chosen for test in plant.tests})
        answer, output = _run(trees[0], tests, _ALL_TIMEOUT_S)
        if answer:
            sys.stdout.write(output[-_SHOWN:])
            print("the tests fail without a planted bug")
            return 2
        outcomes = _try_all(chosen, trees)
    if options.json is not None:
        records = [outcome.record() for outcome in outcomes]
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    missed = [outcome.plant for outcome in outcomes if not outcome.by]
    for plant in missed:
        print(f"not caught: {plant.name}: {plant.bug}")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return min(len(missed), 1)


if __name__ == "__main__":
    sys.exit(main())
