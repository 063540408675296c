"""The pages of docs/reference that are written from the code say what the code says."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("script", "count"), [("reference_pages", 4), ("message_catalogue", 1)])
def test_pages_are_current(script: str, count: int) -> None:
    written = runpy.run_path(str(ROOT / "scripts" / f"{script}.py"))["pages"]()
    assert len(written) == count
    for page, text in written.items():
        assert page.read_text() == text, f"{page.name}: run `make reference`"
