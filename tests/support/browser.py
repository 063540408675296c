"""A real Chromium, and what must hold of a page at any moment: it is read, reached and fits."""

from __future__ import annotations

import contextlib
import os
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from PIL import Image
from playwright.sync_api import expect, sync_playwright

if TYPE_CHECKING:
    from collections.abc import Iterator

    from playwright.sync_api import Browser, Page

__all__ = ["SCREENSHOTS", "chromium", "open_page", "take_screenshot", "wrong_with"]

#: Environment variable: a folder into which tests write screenshots of the docs.
SCREENSHOTS = "WEIGHTSYNC_TEST_SCREENSHOTS"
#: However busy the machine is.
_PATIENCE_MS = 60_000
#: A function of the least contrast; it returns what is wrong.
_CHECKS = Path(__file__).with_name("page_checks.js").read_text()
#: WCAG 2.2, 1.4.3: of text that is not large.
_CONTRAST = 4.5
#: Of a screenshot: the page has few, and the docs take no large pictures.
_COLORS = 128
#: A phone's width in pixels.
_PHONE = 360

expect.set_options(timeout=_PATIENCE_MS)


@contextlib.contextmanager
def chromium(program: str) -> Iterator[Browser]:
    """Run it without a window until the block ends."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program)
        try:
            yield browser
        finally:
            browser.close()


@contextlib.contextmanager
def open_page(browser: Browser, url: str, **options: Any) -> Iterator[Page]:
    """Open a page in a profile of its own; nothing may fail in it, and no dialog may open."""
    context = browser.new_context(viewport={"width": 1000, "height": 760}, **options)
    context.set_default_timeout(_PATIENCE_MS)
    page = context.new_page()
    faults: list[str] = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    # What the policy of the page has kept from running is said there too.
    page.on("console", lambda line: faults.extend([line.text] if _is_fault(line) else []))
    page.on("dialog", lambda dialog: faults.append(dialog.message))
    try:
        page.goto(url)
        yield page
        assert faults == []
    finally:
        context.close()


def _is_fault(line: Any) -> bool:
    # Chromium itself reports each answer of 4xx or 5xx and each connection that is refused.
    return line.type in ("error", "warning") and "Failed to load resource" not in line.text


def take_screenshot(page: Page, name: str) -> None:
    """Write what is seen into the folder of the variable, if that is set, in a few colors."""
    if folder := os.environ.get(SCREENSHOTS):
        page.evaluate("document.activeElement.blur(); window.scrollTo(0, 0)")
        picture = Image.open(BytesIO(page.screenshot(animations="disabled")))
        picture.quantize(_COLORS).save(Path(folder) / f"{name}.png", optimize=True)


def wrong_with(page: Page) -> list[str]:
    """Return what keeps people from reading or using what a page shows now, in either scheme."""
    before = page.viewport_size
    assert before is not None
    found: list[str] = []
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=cast("Any", scheme), reduced_motion="reduce")
        found += [f"{scheme}: {text}" for text in page.evaluate(_CHECKS, _CONTRAST)]
    page.set_viewport_size({"width": _PHONE, "height": 740})
    if (width := page.evaluate("document.documentElement.scrollWidth")) > _PHONE:
        found.append(f"it is {width} pixels wide on a phone")
    page.set_viewport_size(before)
    page.emulate_media(color_scheme="light")
    return found
