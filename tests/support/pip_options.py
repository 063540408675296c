"""What pip is configured with on this machine, for users and images that have none of its files."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

from tests.support.wheels import ROOT, run_command

__all__ = ["folders_of_pip", "pip_options"]

_LINE = re.compile(r"^[\w:.]*\.([\w-]+)=('.*'|\".*\")$", re.MULTILINE)


def pip_options() -> dict[str, str]:
    """Return pip's options by name, of its files and of variables."""
    listed = run_command(sys.executable, "-m", "pip", "config", "list", cwd=ROOT)
    return {
        name: " ".join(ast.literal_eval(value).split()) for name, value in _LINE.findall(listed)
    }


def folders_of_pip() -> list[str]:
    """Return what the options name on disk, outermost folders alone: packages, certificates."""
    text = " ".join(pip_options().values())
    # Links of an index lead to files beside it.
    found = {str(Path(path).parent) for path in re.findall(r"file://(/\S+)", text)}
    for path in re.findall(r"(?:^|\s)(/\S+)", text):
        found.add(path if Path(path).is_dir() else str(Path(path).parent))
    return sorted(p for p in found if not any(p.startswith(f"{o}/") for o in found))
