"""Runs what CI does not and stores in docs/proof.json what it ended with.

python -m tests.prove [--part PART] [--gpu]    PART: a part or a group, such as soak or bench
python -m tests.prove --docs                   write the figures into the docs again
python -m tests.prove --merge FILE             take over what another machine stored
python -m tests.prove --ages                   what was run on which code

A part that fails is not stored, and ends the whole with status 1.
"""

from __future__ import annotations

import argparse
import datetime as dt
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from tests.prove.pages import PAGES, render
from tests.prove.parts import PARTS, chosen
from tests.prove.proof import PROOF, ROOT, Proof, Tree, machine, read, store

if TYPE_CHECKING:
    from tests.prove.parts import Part

__all__ = ["main", "run"]


def run(part: Part, commit: str) -> Proof:
    """Run a part, show what it prints, and return its proof.

    Raises:
        ValueError: It failed, or printed no line.
    """
    print(f"{part.name}: {part.command}", flush=True)
    today = dt.datetime.now(dt.UTC).date().isoformat()
    output = []
    with subprocess.Popen(
        shlex.split(part.command), cwd=ROOT, stdout=subprocess.PIPE, text=True, errors="replace"
    ) as child:
        assert child.stdout is not None
        for text in child.stdout:
            print(text, end="", flush=True)
            output.append(text)
    if child.returncode:
        raise ValueError(f"`{part.command}` ended with {child.returncode}")
    return Proof(part.command, commit, today, machine(), part.line("".join(output)))


def _prove(options: argparse.Namespace) -> int:
    tree = Tree()
    if not tree.known and not options.commit:
        print("no git repository here: name the commit with COMMIT=...")
        return 2
    failed = []
    for part in chosen(options.part, gpu=options.gpu):
        commit = tree.commit() if tree.known else options.commit
        try:
            proof = run(part, commit)
            if tree.known and tree.commit() != commit:
                raise ValueError("another commit was checked out meanwhile")
        except ValueError as error:
            failed.append(f"{part.name}: {error}")
            continue
        store({part.name: proof}, options.store)
    if options.store == PROOF and tree.known:
        write_pages(tree)
    for text in failed:
        print(f"not stored: {text}")
    return int(bool(failed))


def write_pages(tree: Tree) -> None:
    """Write the figures into the docs."""
    older = cache(lambda commit: not tree.has(commit) or tree.differs_from(commit))
    for page in PAGES:
        page.write_text(render(page.read_text(), read(), older))


def _show_ages(tree: Tree) -> None:
    proofs = read()
    for part in PARTS:
        proof = proofs.get(part.name)
        if proof is None:
            print(f"{part.name:16} not run yet")
            continue
        changed = tree.changed_since(proof.commit) if tree.has(proof.commit) else ["all"]
        age = f"{len(changed)} files of code changed since" if changed else "this code"
        print(f"{part.name:16} {proof.commit[:10]} {proof.date}  {age}")


def main() -> int:
    """Return 1 where a part failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--part", default="", help="a part or a group; default: all that CI lacks")
    parser.add_argument("--gpu", action="store_true", help="the parts for a host with GPUs")
    parser.add_argument("--commit", default="", help="what is measured, where there is no git")
    parser.add_argument("--store", type=Path, default=PROOF, help="file for what was found")
    parser.add_argument("--docs", action="store_true", help="only write the docs again")
    parser.add_argument("--merge", type=Path, help="take over what another machine stored")
    parser.add_argument("--ages", action="store_true", help="only tell what was run on which code")
    options = parser.parse_args()
    if options.merge:
        store(read(options.merge))
    if options.ages:
        _show_ages(Tree())
    elif options.docs or options.merge:
        write_pages(Tree())
    else:
        return _prove(options)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ValueError as error:
        sys.exit(str(error))
