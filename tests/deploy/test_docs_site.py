"""`make docs` builds the site from the pages, and refuses a link that leads nowhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.deploy.compose_file import ROOT

if TYPE_CHECKING:
    from pathlib import Path

_QUIET = {"NO_MKDOCS_2_WARNING": "1"}


def _build(tree: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=tree,
        env={**os.environ, **_QUIET},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("mkdocs.yml", "scripts/docs_site.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    return tmp_path


def test_the_site_is_built_and_a_broken_link_fails(tree: Path) -> None:
    done = _build(tree)
    assert done.returncode == 0, done.stdout + done.stderr
    page = (tree / "build/site/explain/architecture/index.html").read_text()
    assert '<pre class="mermaid">' in page
    # Files of the repository are named there, and not linked.
    assert "protos/" in page
    assert "../../protos" not in page
    # What llms.txt names is there, as Markdown.
    linked = re.findall(r"\]\(([^)]+)\)", (tree / "build/site/llms.txt").read_text())
    assert [name for name in linked if not (tree / "build/site" / name).is_file()] == []
    assert "glossary.md" in linked
    assert (tree / "build/site/explain/plots/pauses.svg").is_file()
    (tree / "docs/glossary.md").write_text("# Glossary\n\n[gone](nowhere.md)\n")
    done = _build(tree)
    assert done.returncode != 0
    assert "nowhere.md" in done.stdout + done.stderr
