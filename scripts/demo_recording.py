"""Record `make demo` and draw it as an animated SVG: `make demo-recording`, about three minutes.

The record is docs/assets/demo.cast (asciicast v2), the drawing docs/assets/demo.svg. With --draw
only the drawing is made anew. A test compares it, byte by byte, with what the record gives.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

__all__ = ["draw"]

ROOT = Path(__file__).resolve().parent.parent
_CAST = ROOT / "docs" / "assets" / "demo.cast"
_SVG = _CAST.with_suffix(".svg")
_COLUMNS, _ROWS = 144, 20
#: Pixels of a letter and of a row, and around the text.
_LETTER, _ROW, _EDGE = 7.25, 18, 16
#: How much faster it is played, the longest wait that is shown, and how long the end is, seconds.
_FASTER, _LONGEST_S, _END_S = 3, 3.0, 8.0
#: The titles of the columns, which stay above them.
_TITLES = re.compile(r" *version +loss .*")
#: A line of a version: columns of figures, and what the model says.
_VERSION = re.compile(r" *\d+ +[\d.]+ +[\d.]+ MB .{38}(.*)")
_STYLE = """\
text{font:12px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;fill:#1f2328;white-space:pre}
.back{fill:#f6f8fa;stroke:#d1d9e0}.dim{fill:#59636e}.good{fill:#1a7f37}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.back{fill:#0d1117;stroke:#3d444d}\
.dim{fill:#9198a1}.good{fill:#3fb950}}
@media(prefers-reduced-motion:no-preference){#lines{animation:play """


class Line(NamedTuple):
    """One line of output, and when it was printed, seconds after the start."""

    at: float
    text: str


def draw(cast: str) -> str:
    """Return an SVG of a record, in which lines appear at the end of a screen, each in its time.

    Where nothing moves it shows the end.
    """
    header, *events = map(json.loads, cast.splitlines())
    printed = [Line(at, text.rstrip("\r\n")) for at, _, text in events]
    titles = next((line.text for line in printed if _TITLES.fullmatch(line.text)), "")
    lines = [line for line in printed if line.text != titles]
    times, now = [0.0], 0.0
    for before, line in pairwise(lines):
        now += min(_LONGEST_S, line.at - before.at) / _FASTER
        times.append(now)
    whole = now + _END_S
    moves = {
        f"{100 * at / whole:.2f}": (_ROWS - number) * _ROW for number, at in enumerate(times, 1)
    }
    frames = "".join(f"{at}%{{transform:translateY({y}px)}}" for at, y in moves.items())
    end = (_ROWS - len(lines)) * _ROW
    width, height = round(_COLUMNS * _LETTER + 2 * _EDGE), (_ROWS + 1) * _ROW + 3 * _EDGE + 14
    answers = [found[1] for line in lines if (found := _VERSION.fullmatch(line.text))]
    shown = [_drawn(number, line.text, answers[-1:]) for number, line in enumerate(lines)]
    said = f"The last lines: {' / '.join(' '.join(line.text.split()) for line in lines[-4:])}"
    how = f"{header['title']}, {_FASTER} times as fast; waits longer than {_LONGEST_S:g} s are cut"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"',
            f' width="{width}" height="{height}" role="img" aria-labelledby="title desc">',
            '<title id="title">A recording of make demo</title>',
            f'<desc id="desc">{escape(said)}</desc>',
            f"<style>{_STYLE}{whole:.1f}s step-end infinite}}}}",
            f"@keyframes play{{{frames}}}</style>",
            f'<clipPath id="screen"><rect y="{_EDGE + _ROW}" width="{width}"',
            f' height="{_ROWS * _ROW}"/></clipPath>',
            f'<rect class="back" x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8"/>',
            '<g xml:space="preserve">',
            f'<text class="dim" x="{_EDGE}" y="{_EDGE + _ROW - 5}">{escape(titles)}</text>',
            '<g clip-path="url(#screen)">',
            f'<g id="lines" transform="translate(0 {end})">',
            *shown,
            "</g></g></g>",
            f'<text class="dim" x="{_EDGE}" y="{height - _EDGE}">{escape(how)}</text>',
            "</svg>\n",
        ]
    )


def _drawn(number: int, text: str, learned: Sequence[str]) -> str:
    found = _VERSION.fullmatch(text)
    good = text.startswith("Learned") or (found is not None and found[1] in learned)
    kind = ' class="good"' if good else ""
    y = _EDGE + (number + 2) * _ROW - 5
    return f'<text{kind} x="{_EDGE}" y="{y}">{escape(text[:_COLUMNS])}</text>'


def _recorded(command: Sequence[str]) -> list[Line]:
    begun = time.monotonic()
    lines = [Line(0.0, "$ make demo")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for text in process.stdout:
            print(text, end="", flush=True)
            lines.append(Line(round(time.monotonic() - begun, 2), text.rstrip("\n")))
    if process.returncode:
        sys.exit(f"the demo ended with status {process.returncode}; nothing was written")
    return lines


def _cast(lines: Iterable[Line]) -> str:
    # Of five minutes; the demo alone makes about 3.
    load = os.getloadavg()[1]
    title = f"make demo, recorded on {os.cpu_count()} cores at a load of {load:.0f}"
    header = {"version": 2, "width": _COLUMNS, "height": _ROWS, "title": title}
    events = [[line.at, "o", f"{line.text}\r\n"] for line in lines]
    return "".join(f"{json.dumps(one)}\n" for one in (header, *events))


def _main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--draw", action="store_true", help="only draw the record anew")
    if not parser.parse_args().draw:
        _CAST.write_text(_cast(_recorded([sys.executable, "-m", "examples.demo"])))
    _SVG.write_text(draw(_CAST.read_text()))


if __name__ == "__main__":
    _main()
