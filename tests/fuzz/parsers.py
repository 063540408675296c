"""Runs atheris on one parser: python -m tests.fuzz.parsers TARGET FIGURES [libFuzzer's flags]."""

from __future__ import annotations

import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["weightsync", "json"]):
    from tests.fuzz.deltas import check_delta, mutate_delta
    from tests.fuzz.limits import Limits
    from tests.fuzz.messages import check_message, mutate_message
    from tests.fuzz.mutators import mutate_file, mutate_part
    from tests.fuzz.oracles import check_file, check_part

_TARGETS = {
    "header": (check_file, mutate_file),
    "layout": (check_part, mutate_part),
    "delta": (check_delta, mutate_delta),
    "message": (check_message, mutate_message),
}


def main() -> None:
    """Run until libFuzzer ends the process; a broken oracle ends it with a traceback."""
    _, target, figures, *flags = sys.argv
    attempt, mutate = _TARGETS[target]

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        return mutate(data, most, seed, atheris.Mutate)

    limits = Limits(attempt, Path(figures))
    atheris.Setup([sys.argv[0], *flags], limits, custom_mutator=mutated)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
