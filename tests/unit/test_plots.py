"""The plots in the docs show what docs/proof.json says, and are readable without seeing them."""

from __future__ import annotations

import runpy
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_DRAWN = runpy.run_path(str(ROOT / "scripts" / "plots.py"))["plots"]()
_SVG = "{http://www.w3.org/2000/svg}"


def test_every_plot_is_drawn_by_the_script() -> None:
    assert {path.parent for path in _DRAWN} == {ROOT / "docs/explain/plots"}
    assert set(_DRAWN) == set((ROOT / "docs/explain/plots").iterdir())


@pytest.mark.parametrize("path", _DRAWN, ids=lambda path: path.stem)
def test_a_plot_is_current(path: Path) -> None:
    assert path.read_bytes() == _DRAWN[path].encode(), "run `make plots`"


@pytest.mark.parametrize("path", _DRAWN, ids=lambda path: path.stem)
def test_a_plot_says_in_words_what_it_shows(path: Path) -> None:
    root = ET.fromstring(_DRAWN[path])
    described = root.findtext(f"{_SVG}desc") or ""
    shown = [text.text or "" for text in root.iter(f"{_SVG}text")]
    bars = [text for text in shown if text in described]
    assert len(bars) > len([1 for rect in root.iter(f"{_SVG}rect") if rect.get("height") == "17"])


@pytest.mark.parametrize("path", _DRAWN, ids=lambda path: path.stem)
def test_the_longest_bar_of_a_group_has_the_greatest_value(path: Path) -> None:
    scale: dict[str, set[float]] = {}
    heading, width = "", 0.0
    for node in ET.fromstring(_DRAWN[path]):
        if node.tag == f"{_SVG}rect" and node.get("height") == "17":
            width = float(node.get("width") or 0)
        elif node.tag == f"{_SVG}text" and node.get("class") == "head":
            heading = node.text or ""
        elif node.tag == f"{_SVG}text" and width:
            value = float((node.text or "").split()[0])
            # A bar is at least one unit wide, and tenths of a unit are rounded.
            if width > 10:
                scale.setdefault(heading, set()).add(width / value)
            width = 0.0
    assert scale
    for found in scale.values():
        assert max(found) <= 1.02 * min(found)


def test_the_page_shows_each_plot() -> None:
    page = (ROOT / "docs/explain/performance.md").read_text()
    assert [path for path in _DRAWN if f"](plots/{path.name})" not in page] == []
