"""What docs/how-to/fleets.md says, and what a user types who reads it."""

from __future__ import annotations

import re
from pathlib import Path

__all__ = ["PAGE", "commands"]

_DOCS = Path(__file__).parents[2] / "docs"
PAGE = "\n".join((_DOCS / name).read_text() for name in ("how-to/fleets.md", "explain/fleets.md"))


def commands(program: str) -> list[str]:
    """Return the command lines of a program on the page, without comments."""
    blocks = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    lines = [line.partition(" #")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.split(" ")[0] == program]
