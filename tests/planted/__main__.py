"""Plants each bug into a copy of the tree and sees whether the tests notice.

python -m tests.planted [NAME...]     NAME: a part of a plant's name
python -m tests.planted --one-each    the first of every invariant

Ends with `N of N caught` and, unless all are, with status 1 and the names of those that were not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING

from tests.planted.plants import copy_tree, plants

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tests.planted.plants import Plant

#: What pytest answers when tests failed; any other answer than 0 means that it could not run them.
_FAILED = 1
_TIMEOUT_S = 600


def _run(tree: Path, tests: Iterable[str]) -> tuple[int, str]:
    """Run tests in a copy of the tree; return pytest's answer and the end of its output."""
    paths = os.pathsep.join(str(tree / part) for part in ("", "server", "client"))
    rest = os.environ.get("PYTHONPATH")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([paths, rest] if rest else [paths]),
        # A patch leaves size and second of a file as they were, by which bytecode is judged.
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    flags = ["-x", "-q", "--tb=line", "--timeout=30", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *flags, *tests],
        cwd=tree,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=_TIMEOUT_S,
        check=False,
    )
    return done.returncode, done.stdout.decode(errors="replace")[-2000:]


def _caught(plant: Plant, tree: Path) -> bool:
    plant.apply(tree)
    try:
        answer, output = _run(tree, plant.tests)
    finally:
        plant.apply(tree, undo=True)
    if answer not in (0, _FAILED):
        msg = f"{plant.name}: pytest could not run ({answer}):\n{output}"
        raise RuntimeError(msg)
    return answer == _FAILED


def _make_trees(folder: Path) -> list[Path]:
    """Return a copy of the tree for each processor, of two at most: tests take their time there."""
    trees = [folder / str(number) for number in range(min(2, os.cpu_count() or 1))]
    for tree in trees:
        tree.mkdir()
        copy_tree(tree)
    return trees


def _find_missed(chosen: Sequence[Plant], trees: Iterable[Path]) -> list[Plant]:
    """Plant every bug, in whatever tree is free; return those that were not caught."""
    free: SimpleQueue[Path] = SimpleQueue()
    for tree in trees:
        free.put(tree)

    def is_missed(plant: Plant) -> bool:
        tree = free.get()
        begin = time.monotonic()
        try:
            caught = _caught(plant, tree)
        finally:
            free.put(tree)
        told = "caught" if caught else "NOT CAUGHT"
        print(f"{plant.name}: {told} in {time.monotonic() - begin:.0f} s", flush=True)
        return not caught

    with ThreadPoolExecutor(free.qsize()) as pool:
        answers = list(pool.map(is_missed, chosen))
    return [plant for plant, answer in zip(chosen, answers, strict=True) if answer]


def main(wanted: list[str]) -> int:
    """Return 0 if every bug was caught."""
    chosen = [plant for plant in plants() if not wanted or any(w in plant.name for w in wanted)]
    if wanted == ["--one-each"]:
        chosen = list({plant.invariant: plant for plant in reversed(plants())}.values())
    if not chosen:
        print(f"no plant's name contains {' or '.join(wanted)}; their patches lie in tests/planted")
        return 2
    with tempfile.TemporaryDirectory(prefix="planted-") as name:
        trees = _make_trees(Path(name))
        # A test that fails anyway catches nothing.
        tests = sorted({test for plant in chosen for test in plant.tests})
        answer, output = _run(trees[0], tests)
        if answer:
            sys.stdout.write(output)
            print("the tests fail without a planted bug")
            return 2
        missed = _find_missed(chosen, trees)
    for plant in missed:
        print(f"not caught: {plant.name}: {plant.bug}")
    print(f"{len(chosen) - len(missed)} of {len(chosen)} caught")
    return min(len(missed), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
