"""Names of engines: which the settings may name, and what each is called."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["NAME", "SUFFIX", "check_engines", "engine_name"]

#: What an engine may be called.
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
#: Of sockets of bridges.
SUFFIX = ".sock"
_ALONE = ("embedded", "memory", "none")


def engine_name(engine: str | Path) -> str:
    """Return what an engine is called: the file name of its socket, or what it is."""
    return Path(str(engine).removeprefix("unix:")).name.removesuffix(SUFFIX)


def check_engines(engines: Sequence[str]) -> None:
    """Refuse engines that cannot be told apart, or are none.

    Raises:
        ValueError: With the remedy.
    """
    for engine in engines:
        if engine not in _ALONE and not engine.startswith("unix:"):
            raise ValueError(
                f"engine must be unix:PATH, 'embedded', 'memory' or 'none', not {engine!r}"
            )
        if engine not in _ALONE and not NAME.fullmatch(engine_name(engine)):
            raise ValueError(
                f"engine must name a socket of letters, digits and . _ -, such as "
                f"unix:/run/engine.sock, not {engine!r}"
            )
        if engine in _ALONE and len(engines) > 1:
            raise ValueError(f"engine {engine} goes with no other; name it alone, or sockets only")
    names = Counter(map(engine_name, engines))
    twice = next((name for name, count in names.items() if count > 1), "")
    if twice:
        raise ValueError(
            f"two engines would be called {twice}; give their sockets different file names"
        )
