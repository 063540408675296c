"""A loader that takes the place of another is held to what the first one has told."""

from __future__ import annotations

import json

import pytest

from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.shadow.model_state import LoadFacts

FIRST = LoadFacts({"rotary": "aa", "mask": "bb"}, frozenset({"mtp.weight"}))


def test_the_same_is_accepted_also_after_its_way_over_a_socket() -> None:
    LoadFacts.from_json(json.loads(json.dumps(FIRST.to_json()))).check(FIRST)


@pytest.mark.parametrize("others", [{"rotary": "aa", "mask": "cc"}, {"rotary": "aa"}])
def test_what_the_weights_have_changed_is_refused_by_name(others: dict[str, str]) -> None:
    with pytest.raises(PlanRefusedError) as refused:
        LoadFacts(others, FIRST.unread).check(FIRST)
    assert refused.value.names == ["mask"]


def test_what_is_read_no_more_is_refused_by_name() -> None:
    with pytest.raises(PlanRefusedError) as refused:
        LoadFacts(FIRST.others, FIRST.unread | {"q_proj.weight"}).check(FIRST)
    assert refused.value.names == ["q_proj.weight"]
    LoadFacts(FIRST.others, frozenset()).check(FIRST)
