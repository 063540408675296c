"""What README and docs have a reader type: each code block, and each command inside a sentence."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PAGES", "PROGRAMS", "ROOT", "Command", "Snippet", "blocks", "commands", "inline"]

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: Has sentences for people, with commands in them, too.
_ALERTS = ROOT / "deploy/prometheus/alerts.yml"

_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"(`+)(.+?)\1", re.DOTALL)
_ASSIGNMENT = re.compile(r"\w+=.*")
#: What ends a command and what joins two.
_JOINTS = frozenset({"&&", "||", ";", "|", "&"})
#: The first words of what a reader types in a shell.
PROGRAMS = frozenset(
    {"weightsync", "weightsync-server", "make", "pip", "python", "vllm", "torchrun", "docker"}
    | {"curl", "etcdctl", "promtool", "usermod"}
)


@dataclass(frozen=True)
class Snippet:
    """One piece of code on a page.

    Attributes:
        page: Path of the file.
        line: Of its first line.
        language: As the page names it; "": it does not.
        text: The code.
    """

    page: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """What is typed at once.

    Attributes:
        source: Where it stands.
        words: Program and arguments, as the shell would give them.
        in_sentence: Whether it stands in a sentence, which may name a command without arguments.
    """

    source: str
    words: tuple[str, ...]
    in_sentence: bool

    def __str__(self) -> str:
        return f"{self.source} {shlex.join(self.words)}"


def blocks() -> list[Snippet]:
    """Return every code block of every page."""
    return [
        Snippet(_name(page), _line(text, found.start(3)), found[2], textwrap.dedent(found[3]))
        for page in PAGES
        for text in [page.read_text()]
        for found in _FENCE.finditer(text)
    ]


def inline() -> list[Snippet]:
    """Return all code inside sentences of the pages and of the alerts."""
    found: list[Snippet] = []
    for page in [*PAGES, _ALERTS]:
        # Blocks leave their lines behind, so that numbers stay right.
        text = _FENCE.sub(lambda block: "\n" * block[0].count("\n"), page.read_text())
        for code in _INLINE.finditer(text):
            words = " ".join(code[2].split())
            found.append(Snippet(_name(page), _line(text, code.start()), "", words))
    return found


def commands(*programs: str) -> list[Command]:
    """Return every command of some programs, each once.

    Args:
        *programs: First words; none: all that there are in blocks.
    """
    found: dict[tuple[str, ...], Command] = {}
    for block in blocks():
        if block.language in ("sh", "bash"):
            for words in _typed(block.text):
                found.setdefault(words, Command(str(block), words, in_sentence=False))
    for code in inline():
        if code.text.split(" ")[0] in PROGRAMS and " " in code.text:
            for words in _typed(code.text):
                found.setdefault(words, Command(str(code), words, in_sentence=True))
    return [one for one in found.values() if not programs or one.words[0] in programs]


def _typed(text: str) -> list[tuple[str, ...]]:
    """Return the commands of a piece of shell, without variables before them and ellipses."""
    found: list[tuple[str, ...]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=";&|")
        lexer.whitespace_split = True
        words = [word for word in lexer if word not in ("...", "…")]
        while words:
            end = next((i for i, word in enumerate(words) if word in _JOINTS), len(words))
            command, words = words[:end], words[end + 1 :]
            while command and _ASSIGNMENT.fullmatch(command[0]):
                command = command[1:]
            if command:
                found.append(tuple(command))
    return found


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _line(text: str, offset: int) -> int:
    return text.count("\n", 0, offset) + 1
