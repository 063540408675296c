"""The wheel as a user gets it: built from an export of the tree without git."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["ROOT", "build_wheel", "export_tree", "run_command"]

ROOT = Path(__file__).resolve().parents[2]


def run_command(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command to its end and return what it printed."""
    # What is installed is meant, not this tree.
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | environment
    ran = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return ran.stdout + ran.stderr


def export_tree(folder: Path) -> Path:
    """Copy into a folder what git has, or would take, of this tree."""
    listing = run_command("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in filter(lambda line: (ROOT / line).is_file(), listing.splitlines()):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / name)
    return folder


def build_wheel(export: Path) -> Path:
    """Build the wheel of an exported tree."""
    run_command(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", "out", cwd=export)
    (built,) = (export / "out").glob("*.whl")
    return built
