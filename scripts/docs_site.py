"""Makes pages that are written for a forge fit a site: links to files outside of docs/ become text.

The site has no copy of the repository. Whoever publishes it may set REPOSITORY_URL, to which the
paths are appended, to keep such links.
"""

from __future__ import annotations

import os
import posixpath
import re
from typing import Any

__all__ = ["on_page_markdown"]

_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(((?:\.\./)+[^)\s]*)\)")


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
