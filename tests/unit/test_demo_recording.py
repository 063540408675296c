"""The drawing of the demo is what its record gives, line by line and in time."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_CAST = ROOT / "docs/assets/demo.cast"
_SCRIPT = runpy.run_path(str(ROOT / "scripts/demo_recording.py"))
draw = _SCRIPT["draw"]
_FASTER, _LONGEST_S, _END_S = (_SCRIPT[name] for name in ("_FASTER", "_LONGEST_S", "_END_S"))
_TITLES = "version     loss      sent  of all  push ms  pause ms   gap ms  text"
_VERSION = f"      2   4.0000  37.00 MB  {'99.6%    50.0     12.0     30.0':>34}  a < b"


def _cast(*lines: tuple[float, str]) -> str:
    events = [[at, "o", f"{text}\r\n"] for at, text in lines]
    return "".join(f"{json.dumps(one)}\n" for one in ({"version": 2, "title": "t"}, *events))


def _moves(drawn: str) -> list[tuple[float, int]]:
    found = re.findall(r"([\d.]+)%{transform:translateY\((-?\d+)px\)}", drawn)
    return [(float(at), int(y)) for at, y in found]


def test_the_drawing_is_that_of_the_record() -> None:
    drawn = _CAST.with_suffix(".svg").read_bytes()
    assert drawn == draw(_CAST.read_text()).encode(), "run `scripts/demo_recording.py --draw`"


def test_the_recorded_model_has_learned() -> None:
    lines = [json.loads(line)[2] for line in _CAST.read_text().splitlines()[1:]]
    assert lines[0] == "$ make demo\r\n"
    assert lines[-1].startswith("Learned: ")
    assert "NOT PROVED" not in "".join(lines)


def test_lines_appear_one_after_the_other_and_long_waits_are_cut() -> None:
    moves = _moves(draw(_cast((0, "$ make demo"), (1.5, "one"), (100, "two"))))
    assert [y for _, y in moves] == [342, 324, 306]
    whole = (1.5 + _LONGEST_S) / _FASTER + _END_S
    at = [100 * seconds / whole for seconds in (0, 1.5 / _FASTER, (1.5 + _LONGEST_S) / _FASTER)]
    assert [when for when, _ in moves] == pytest.approx(at, abs=0.01)


def test_where_nothing_moves_the_end_is_shown() -> None:
    drawn = draw(_cast(*((float(number), f"line {number}") for number in range(50))))
    assert f'transform="translate(0 {_moves(drawn)[-1][1]})"' in drawn
    assert "@media(prefers-reduced-motion:no-preference){#lines{animation:" in drawn


def test_titles_stay_and_what_is_learned_is_marked() -> None:
    drawn = draw(_cast((0, "$ make demo"), (1, _TITLES), (2, _VERSION), (3, "Learned: it")))
    assert drawn.count(_TITLES) == 1
    assert drawn.index(_TITLES) < drawn.index('id="lines"')
    assert re.findall(r'class="good"[^>]*>.*?(\S+)</text>', drawn) == ["b", "it"]
    assert "a &lt; b" in drawn
