"""What others rely on by name is what was recorded: nothing goes or changes unnoticed."""

from __future__ import annotations

import json

import pytest

from tests.vectors.borders import FILE, recorded

_WAS = json.loads(FILE.read_text())
_IS = json.loads(json.dumps(recorded()))


@pytest.mark.parametrize("border", sorted(_WAS))
def test_a_border_is_as_it_was_recorded(border: str) -> None:
    was, found = _WAS[border], _IS[border]
    changed = {name for name in was.keys() | found.keys() if was.get(name) != found.get(name)}
    assert not changed, (
        "keep it, or an alias of it for one release; for something new run python -m "
        f"tests.vectors.borders and name it in CHANGELOG.md: {sorted(changed)}"
    )


def test_every_border_is_recorded() -> None:
    assert _WAS.keys() == _IS.keys()
    assert all(_WAS.values())
