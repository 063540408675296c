"""The fields of verl and miles, from answers, against the shape that their sources have.

verl: verl/workers/rollout/llm_server.py, `FullyAsyncLLMServerClient.generate`, which keeps the
smallest and largest `global_steps`. miles: miles/utils/types.py, `WeightVersionsPerCall` and
`Sample.update_from_meta_info`; slime has the latter with `weight_version` alone.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightsync_client import Client, InvalidError
from weightsync_client.integrations import VersionLabels, miles_meta_info, verl_extra_fields

if TYPE_CHECKING:
    from tests.unit.client.servicer import Running

HEADERS = {"x-weightsync-version": "41,42", "x-weightsync-spans": "41:0-2,42:2-5;keys=41"}
STEPS = {41: 120, 42: 130}


def _anchored(meta_info: dict[str, Any], output_end: int) -> list[tuple[str, int, int]]:
    """Do what miles does: place the spans of a call among the tokens of its sample."""
    count = len(meta_info.get("output_token_logprobs") or [])
    if (raw := meta_info.get("weight_versions")) is not None:
        relative = [(span["version"], span["start"], span["end"]) for span in raw]
        assert all(end <= count for _, _, end in relative)
    else:
        relative = [(meta_info["weight_version"], 0, count)]
    begin = output_end - count
    return [(version, begin + start, begin + end) for version, start, end in relative]


def test_miles_places_the_spans_of_each_turn() -> None:
    turn = {"output_token_logprobs": [0.0] * 5, **miles_meta_info(HEADERS)}
    placed = _anchored(turn, output_end=25)
    assert placed == [("41", 20, 22), ("42", 22, 25)]
    assert min(int(version) for version, _, _ in placed) == 41
    # What knows one version for a call has the oldest.
    assert turn["weight_version"] == "41"


def test_miles_has_the_oldest_version_where_spans_were_not_asked_for() -> None:
    turn = {"output_token_logprobs": [0.0] * 5}
    turn |= miles_meta_info({"x-weightsync-version": "42,43"})
    assert _anchored(turn, output_end=5) == [("42", 0, 5)]


def test_miles_reads_one_of_several_choices() -> None:
    headers = {"x-weightsync-version": "41,42", "x-weightsync-spans": "41:0-2 42:0-3 -"}
    found = miles_meta_info(headers, choice=1)
    assert found["weight_version"] == "42"
    assert found["weight_versions"] == [{"version": "42", "start": 0, "end": 3}]
    assert miles_meta_info(headers, choice=2)["weight_versions"] == []
    with pytest.raises(InvalidError, match="choice is 3; this answer has 3"):
        miles_meta_info(headers, choice=3)


def test_verl_has_the_smallest_and_the_largest_step() -> None:
    found = verl_extra_fields(HEADERS, STEPS.__getitem__)
    assert found == {"global_steps": 130, "min_global_steps": 120, "max_global_steps": 130}
    spans = [SimpleNamespace(version="42", start=0, end=2)]
    output = SimpleNamespace(outputs=[SimpleNamespace(weight_versions=spans)])
    assert set(verl_extra_fields(output, STEPS.__getitem__).values()) == {130}


def test_a_step_is_asked_for_once(running: Running) -> None:
    with Client(running.address) as client:
        asked: list[int] = []

        def get_version(version: int = 0) -> Any:
            asked.append(version)
            return SimpleNamespace(version=version, metadata={"step": "7", "sync": "x"})

        client.get_version = get_version  # type: ignore[method-assign]
        steps = VersionLabels(client)
        assert [steps(41), steps(41), steps(42)] == [7, 7, 7]
        assert asked == [41, 42]
        with pytest.raises(
            InvalidError, match=r"^push version 41 with metadata 'sync'.*it has 'x'"
        ):
            VersionLabels(client, "sync")(41)
