"""What people read is plain English: no message of the source has these words."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
#: Words of the kind "the delta does not make what it tells", each with what to say instead.
INSTEAD = {
    r"tells?|told|telling": "says, reports, declares",
    r"nobody|somebody|anybody|whoever": "no one, no caller; who it is",
    r"take note": "record",
    r"st(?:an|oo)ds? still|standing still": "is paused",
    r"comes?|came|coming": "arrives, is sent, is read from",
    r"anew": "again, started over, restarted",
    r"as it was|as they were": "unchanged, as in ...",
    r"is there already": "already exists",
    r"have not got|has not got": "does not have",
    r"puts? back": "restore, roll back",
    r"shall": "should, must",
    r"is at work|goes on|went on": "is running, continues",
    r"lies? (?:in|at|on|beside|below|across)": "is in",
    r"in the place of|in place of": "instead of",
    r"look (?:at|into|who)": "check",
    r"let(?:s|ting)? go of": "release",
}


def _messages() -> list[Any]:
    found = runpy.run_path(str(ROOT / "scripts" / "message_catalogue.py"))["messages"]()
    assert len(found) > 2000
    return list(found)


def test_messages_are_plain_english() -> None:
    forbidden = [(re.compile(rf"\b(?:{words})\b"), say) for words, say in INSTEAD.items()]
    assert [
        f"{one.path}:{one.line}: {one.text!r}: instead of {found[0]!r}: {say}"
        for one in _messages()
        for pattern, say in forbidden
        if (found := pattern.search(one.text))
    ] == []


def test_messages_of_helpers_constants_and_logs_are_found() -> None:
    kinds = {(one.kind, one.text) for one in _messages()}
    assert ("DATA_CORRUPT", "{shown} was cut short") not in kinds
    # From a helper whose reason another function gives, a constant, a log, and one by room.
    assert any(kind == "SHARD_INVALID" and "shard header" in text for kind, text in kinds)
    assert any(kind == "critical" and "is violated" in text for kind, text in kinds)
    assert any(kind == "UNAUTHENTICATED" or "no valid token" in text for kind, text in kinds)
    # Short ones, of a word and a value.
    assert {("info", "read %s again"), ("info", "engine %s appears")} <= kinds
    assert all(text == " ".join(text.split()) for _, text in kinds)
