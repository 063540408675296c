from __future__ import annotations

import base64
import random
import zlib

import pytest

from weightsync.model.name_sets import common, pack, unpack

NAMES = [f"layers.{layer}.{part}" for layer in range(20) for part in ("q", "k", "µ")]


@pytest.mark.parametrize("count", [0, 1, 7, 8, 9, 60])
def test_a_set_comes_back_whatever_the_order_of_the_names(count: int) -> None:
    names = NAMES[:count]
    chosen = frozenset(names[::3])
    shuffled = random.Random(count).sample(names, count)
    assert unpack(pack(chosen, shuffled), names) == chosen
    assert pack(chosen, shuffled) == pack(set(chosen), names)


def test_what_all_have_in_common_is_found() -> None:
    sets = [frozenset(NAMES[:40]), frozenset(NAMES[20:]), frozenset(NAMES[30:35])]
    shared = common(pack(chosen, NAMES) for chosen in sets)
    assert unpack(shared, NAMES) == frozenset(NAMES[30:35])
    assert common([pack(sets[0], NAMES)]) == pack(sets[0], NAMES)


def test_forty_thousand_names_fit_a_status_page_and_a_call() -> None:
    names = [f"model.layers.{n // 500}.mlp.experts.{n % 500}.weight" for n in range(40_000)]
    chosen = frozenset(random.Random(1).sample(names, 20_000))
    assert len(pack(chosen, names)) < 8_000
    stage = frozenset(names[:20_000])
    assert len(pack(stage, names)) < 3_000
    assert unpack(pack(stage, names), names) == stage


def test_sets_of_other_names_are_refused() -> None:
    text = pack((), NAMES)
    with pytest.raises(ValueError, match="there are 9 names"):
        unpack(text, NAMES[:9])
    with pytest.raises(ValueError, match="not the same names"):
        common([text, pack((), NAMES[:9])])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no base64!",
        base64.b64encode(b"no zlib").decode(),
        base64.b64encode(zlib.compress(bytes(8))[:-3]).decode(),
        base64.b64encode(zlib.compress(bytes(2 << 20))).decode(),
    ],
    ids=["empty", "no base64", "no zlib", "cut", "too long"],
)
def test_what_is_no_set_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a set"):
        unpack(text, NAMES)
