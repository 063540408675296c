"""Pages are short enough to read: a limit for each page and each paragraph, and an index of all."""

from __future__ import annotations

import re
import runpy
import xml.etree.ElementTree as ET
from typing import TYPE_CHECKING

import pytest
import yaml

from tests.support.snippets import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

DOCS = ROOT / "docs"
_MOST_WORDS, _MOST_IN_PARAGRAPH = 2_500, 120
#: Pages that one looks things up in, and the notebook.
_LONG = ("reference",)
_README_BYTES = 9_000
_LEAST_IN_PICTURE, _PICTURE_BYTES = 8, 60_000
_SVG = "{http://www.w3.org/2000/svg}"
#: What has a letter or a digit in it: the lines of a table are no words.
_WORD = re.compile(r"\S*\w\S*")
_pages = pytest.mark.parametrize("page", sorted(DOCS.rglob("*.md")), ids=str)


def _paragraphs(text: str) -> Iterator[str]:
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", text):
        if block.strip() and not block.lstrip().startswith(("|", "<!--")):
            yield block


@_pages
def test_a_page_is_short(page: Path) -> None:
    if page.relative_to(DOCS).parts[0] not in _LONG:
        assert len(_WORD.findall(page.read_text())) <= _MOST_WORDS


@_pages
def test_a_paragraph_is_short(page: Path) -> None:
    long = {
        paragraph[:60]: count
        for paragraph in _paragraphs(page.read_text())
        if (count := len(paragraph.split())) > _MOST_IN_PARAGRAPH
    }
    assert long == {}


def test_the_readme_is_read_in_five_minutes() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= _README_BYTES


def test_every_page_is_in_the_index_and_in_the_navigation() -> None:
    index = (DOCS / "index.md").read_text()
    # The tag of a Python object is mkdocs', whose own loader knows it.
    site = re.sub(r"!!python/name:\S+", "x", (ROOT / "mkdocs.yml").read_text())
    listed = set(re.findall(r"[\w/-]+\.md", yaml.dump(yaml.safe_load(site)["nav"])))
    pages = {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
    assert listed == pages
    lab = {page for page in pages if page.startswith("lab/")}
    linked = set(re.findall(r"\]\(([\w/-]+\.md)", index)) | {"index.md"}
    assert pages - linked - lab == set()


@pytest.mark.parametrize("page", [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))], ids=str)
def test_a_picture_is_said_in_words_and_readable_in_the_dark(page: Path) -> None:
    for words, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", page.read_text()):
        assert len(words.split()) > _LEAST_IN_PICTURE, path
        picture = (page.parent / path).read_bytes()
        assert len(picture) <= _PICTURE_BYTES, path
        if path.endswith(".svg"):
            text = picture.decode()
            root = ET.fromstring(text)
            assert root.find(f"{_SVG}title") is not None, path
            assert root.find(f"{_SVG}desc") is not None, path
            assert "@media(prefers-color-scheme:dark)" in text, path
            # A page shows it as an image, in which neither scripts nor other files are loaded.
            assert not re.search(r"<script|<image|@import|url\((?!#)", text), path


def test_llms_txt_is_current_and_names_every_page() -> None:
    text = (DOCS / "llms.txt").read_text()
    assert text == runpy.run_path(str(ROOT / "scripts/docs_site.py"))["llms_txt"](), (
        "run `make reference`"
    )
    assert re.match(r"# \S+\n\n> \S.*\n\n## ", text)
    entries = re.findall(r"^- \[[^]]+\]\(([^)]+)\): [A-Z`\w].+[.]$", text, re.MULTILINE)
    assert len(entries) == text.count("\n- ")
    assert set(entries) == {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")}
