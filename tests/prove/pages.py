"""The figures in the docs come from docs/proof.json: this writes them, and says what is missing.

Between `<!-- proof: NAMES -->` and `<!-- end of proof -->` stands what the file tells of these
parts or groups. A section whose figures were measured by hand says so with a block of a part
`page-...`, which has a commit and no line.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from tests.prove.parts import PARTS
from tests.prove.proof import ROOT

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tests.prove.proof import Proof

__all__ = ["PAGES", "render", "unproved"]

PAGES: tuple[Path, ...] = (
    ROOT / "docs/explain/guarantees.md",
    ROOT / "docs/explain/performance.md",
    *sorted((ROOT / "docs/lab").glob("*.md")),
)

_BLOCK = re.compile(r"(<!-- proof: ([^>]+) -->\n).*?(<!-- end of proof -->)", re.DOTALL)
#: What a line of a run looks like where nobody wrote it.
_FIGURE = re.compile(r"\d+ of \d+ caught|\"violations\":|\d+ (?:tests )?passed|\| [^|]*\d[.,]\d")
#: Of a line of JSON, what is no figure.
#: Rows of one line that a page shows.
_ROWS = 5
_ABOUT = (
    "seed", "minutes", "benchmark", "parameters", "spread", "machine", "beside", "fuzz",
    "wanted_at_most",
)  # fmt: skip


def render(text: str, proofs: Mapping[str, Proof], older: Callable[[str], bool]) -> str:
    """Return a page with every block as the proofs tell.

    Args:
        text: The page.
        proofs: By part.
        older: Whether code has changed since a commit.
    """

    def block(match: re.Match[str]) -> str:
        names = match[2].split()
        found = [
            (name, proof)
            for name, proof in sorted(proofs.items(), key=lambda item: _place(item[0]))
            if name in names or name.partition("-")[0] in names
        ]
        return f"{match[1]}{_table(found, older)}{match[3]}"

    return _BLOCK.sub(block, text)


def unproved(text: str) -> list[str]:
    """Return the headings of the sections whose figures have no commit."""
    sections = re.split(r"^(?=## )", text, flags=re.MULTILINE)
    wrong = []
    for section in sections:
        free = _BLOCK.sub("", section)
        if _FIGURE.search(free) and "<!-- proof: page" not in section:
            wrong.append(section.partition("\n")[0])
    return wrong


def _place(name: str) -> tuple[int, str]:
    order = [part.name for part in PARTS]
    return (order.index(name) if name in order else len(order), name)


def _table(found: list[tuple[str, Proof]], older: Callable[[str], bool]) -> str:
    pages = [(name, proof) for name, proof in found if not proof.line]
    if pages:
        return "".join(f"{_page(proof, older)}\n" for _, proof in pages)
    if not found:
        return "Not run yet.\n"
    rows = ["| command | commit, day, machine | line |", "|---|---|---|"]
    for _, proof in found:
        command = proof.command.replace("make -s ", "make ")
        rows.append(f"| `{command}` | {_when(proof, older)}; {proof.machine} | {_line(proof)} |")
    return "\n".join(rows) + "\n"


def _page(proof: Proof, older: Callable[[str], bool]) -> str:
    return f"*Figures of this section: {_when(proof, older)}; {proof.machine}.*"


def _when(proof: Proof, older: Callable[[str], bool]) -> str:
    how = "written down in " if proof.written else ""
    since = f"`{proof.since[:10]}` to " if proof.since else ""
    age = ", code has changed since" if older(proof.commit) else ""
    return f"{how}{since}`{proof.commit[:10]}`, {proof.date}{age}"


def _line(proof: Proof) -> str:
    if not proof.line.startswith("{"):
        return f"`{proof.line}`"
    facts = {name: _flat(value) for name, value in _shown(json.loads(proof.line)).items()}
    return f"`{json.dumps(facts)[1:-1]}`"


def _shown(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what a page tells of a line: of a long list, its last row, of each row the figures."""
    found = {}
    for name, value in facts.items():
        if name in _ABOUT:
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            kept = value if len(value) <= _ROWS else value[-1:]
            found[name] = [_shown(row) for row in kept]
        else:
            found[name] = value
    return found


def _flat(value: object) -> object:
    # Of a fuzzer's target its number of inputs.
    return value.get("inputs", len(value)) if isinstance(value, dict) else value
