"""The pages of docs/reference that are written from the code say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_pages_are_current() -> None:
    written = runpy.run_path(str(ROOT / "scripts" / "reference_pages.py"))["pages"]()
    assert len(written) == 4
    for page, text in written.items():
        assert page.read_text() == text, f"{page.name}: run `make reference`"
