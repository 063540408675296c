"""Makes pages that are written for a forge fit a site, and writes docs/llms.txt: `make reference`.

The site has no copy of the repository: links to files outside of docs/ become text. Whoever
publishes it may set REPOSITORY_URL, to which the paths are appended, to keep such links. The site
also has each page as Markdown, at its path in docs/, for programs that begin at llms.txt.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

__all__ = ["llms_txt", "on_page_markdown", "on_post_page"]

ROOT = Path(__file__).resolve().parent.parent
_DOCS = ROOT / "docs"
#: What may be left out where there is little room; the format has a section of this name for it.
_OPTIONAL = "Lab notebook"
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")
_SENTENCE = re.compile(r"(.+?[.!?])(?=\s|$)", re.DOTALL)
_THIS_PAGE = re.compile(r"^This page (?:shows|explains|lists|has|gives) ")
#: Neither a list, a table, an image nor a block of code.
_PARAGRAPH = re.compile(r"^(?![-#|!]|```)\S.+?(?=\n\s*\n|\Z)", re.DOTALL | re.MULTILINE)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Return the text of a page with links out of docs/ replaced; mkdocs calls it for each page."""
    folder = posixpath.dirname(page.file.src_uri)
    root = os.environ.get("REPOSITORY_URL", "").rstrip("/")

    def replaced(link: re.Match[str]) -> str:
        path, _, anchor = link[2].partition("#")
        target = posixpath.normpath(posixpath.join(folder, path))
        if not target.startswith(".."):
            return link[0]
        name = target.removeprefix("../")
        return f"[{link[1]}]({root}/{name}{'#' + anchor if anchor else ''})" if root else link[1]

    return _LINK.sub(replaced, markdown)


def on_post_page(output: str, page: Any, config: Any, **_: Any) -> str:
    """Put the Markdown of a page beside its HTML; mkdocs calls it for each page."""
    path = Path(config.site_dir, page.file.src_uri)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page.markdown)
    return output


def llms_txt() -> str:
    """Return docs/llms.txt: every page of the navigation with its first sentence."""
    # The tag of a Python object is mkdocs', whose own loader knows it.
    site = yaml.safe_load(re.sub(r"!!python/name:\S+", "x", (ROOT / "mkdocs.yml").read_text()))
    readme = (ROOT / "README.md").read_text()
    lines = ["# WeightSync", "", f"> {_first_paragraph(readme)}"]
    for heading, pages in _sections(site["nav"]):
        lines += ["", f"## {heading}", ""]
        for page in pages:
            text = (_DOCS / page).read_text()
            title = text.partition("# ")[2].partition("\n")[0]
            lines.append(f"- [{title}]({page}): {_first_sentence(text)}")
    return "\n".join(lines) + "\n"


def _sections(nav: list[Any], above: str = "") -> Iterator[tuple[str, list[str]]]:
    """Yield headings with their pages; a section within another is named after both."""
    for entry in nav:
        for name, content in entry.items():
            heading = f"{above}: {name[0].lower()}{name[1:]}" if above else name
            pages = [page for item in content if (page := _page(item))]
            if pages:
                yield "Optional" if heading == _OPTIONAL else heading, pages
            yield from _sections([item for item in content if not _page(item)], heading)


def _page(item: Any) -> str:
    """Return the path of a page in the navigation, which may have a name; "": it is a section."""
    path = item if isinstance(item, str) else next(iter(item.values()))
    return path if isinstance(path, str) else ""


def _first_sentence(text: str) -> str:
    """Return what a page is about, without its subject where that is the page."""
    found = _SENTENCE.match(_first_paragraph(text))
    whole = found[1] if found else ""
    said = _THIS_PAGE.sub("", whole)
    return whole if said == whole else said[0].upper() + said[1:]


def _first_paragraph(text: str) -> str:
    """Return the first paragraph below the title, without links and line breaks."""
    body = re.sub(r"<!--.*?-->", "", text.partition("# ")[2].partition("\n")[2], flags=re.DOTALL)
    found = _PARAGRAPH.search(body)
    return " ".join(re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", found[0] if found else "").split())


if __name__ == "__main__":
    (_DOCS / "llms.txt").write_text(llms_txt())
