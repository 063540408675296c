"""Which tokens each version made, and whose keys they used: the spans of an answer."""

from __future__ import annotations

import asyncio

import pytest

from tests.unit.vllm.extensions.answers.site import Site, answer_of, events_of
from weightsync.vllm.bridge.live_versions import KeptKeys, LiveVersions
from weightsync.vllm.extensions.answers.spans import MOST_BYTES, sequence_spans, spans_text

SPANS = {"x_weightsync_spans": "1"}


def _text(*switches: tuple[int, KeptKeys], starts: list[tuple[str, int]], count: int) -> str:
    """Return the spans of a sequence that began under 41."""
    live = LiveVersions()
    live.begin(41)
    since = live.current
    for version, kept in switches:
        live.begin(version, kept)
    found = sequence_spans(tuple(since.walk()), starts, count)
    return "" if found is None else str(found)


def test_spans_are_half_open_and_end_with_the_last_token() -> None:
    assert _text(starts=[("41", 0)], count=3) == "41:0-3"
    starts = [("41", 0), ("42", 142)]
    assert _text((42, KeptKeys.NONE), starts=starts, count=300) == "41:0-142,42:142-300"
    assert _text((42, KeptKeys.NONE), starts=starts, count=142) == "41:0-142"
    assert _text(starts=[], count=0) == "-"


@pytest.mark.parametrize("kept", [KeptKeys.IN_FLIGHT, KeptKeys.ALL])
def test_keys_that_were_kept_are_named_by_version(kept: KeptKeys) -> None:
    starts = [("41", 0), ("42", 2), ("43", 4)]
    both = _text((42, kept), (43, kept), starts=starts, count=5)
    assert both == "41:0-2,42:2-4,43:4-5;keys=41,42"
    # What was computed again uses none of those before.
    last = _text((42, KeptKeys.NONE), (43, kept), starts=starts, count=5)
    assert last == "41:0-2,42:2-4,43:4-5;keys=41,42".replace("41,42", "42")
    first = _text((42, kept), (43, KeptKeys.NONE), starts=starts, count=5)
    assert first == "41:0-2,42:2-4,43:4-5;keys=41"


def test_a_request_that_waited_may_have_used_keys_of_when_it_came() -> None:
    kept = (42, KeptKeys.IN_FLIGHT)
    assert _text(kept, starts=[("42", 0)], count=5) == "42:0-5;keys=41"
    assert _text((42, KeptKeys.NONE), starts=[("42", 0)], count=5) == "42:0-5"


def test_a_new_request_finds_keys_of_others_only_where_all_may() -> None:
    for kept, keys in ((KeptKeys.ALL, ";keys=41"), (KeptKeys.IN_FLIGHT, ""), (KeptKeys.NONE, "")):
        live = LiveVersions()
        live.begin(41)
        live.begin(42, kept)
        assert str(sequence_spans((live.current,), [("42", 0)], 5)) == f"42:0-5{keys}"


def test_a_version_that_came_back_is_told_from_the_one_between() -> None:
    kept = KeptKeys.IN_FLIGHT
    starts = [("41", 0), ("42", 2), ("41", 4)]
    text = _text((42, kept), (41, kept), starts=starts, count=5)
    assert text == "41:0-2,42:2-4,41:4-5;keys=41,42"
    # Without a token of it, nobody can tell on which side of it a token of 41 was.
    text = _text((42, kept), (41, kept), starts=[("41", 0)], count=5)
    assert text == "41:0-5;keys=42"


def test_a_part_of_no_known_version_leaves_no_spans() -> None:
    assert _text((0, KeptKeys.NONE), starts=[("41", 0)], count=5) == "41:0-5"
    assert _text(starts=[("foreign", 0)], count=5) == ""
    live = LiveVersions()
    assert sequence_spans((live.current,), [("default", 0)], 5) is None


def test_labels_of_one_version_are_one_span() -> None:
    live = LiveVersions()
    live.begin(41)
    since = live.current
    live.relabel("step-7")
    found = sequence_spans(tuple(since.walk()), [("41", 0), ("step-7", 2)], 5)
    assert str(found) == "41:0-5"


def test_a_header_that_proxies_refuse_is_left_out() -> None:
    one = sequence_spans((LiveVersions().current,), [], 0)
    assert one is not None
    most = (MOST_BYTES + 1) // 2
    assert len(spans_text([one] * most)) == MOST_BYTES - (MOST_BYTES + 1) % 2
    assert spans_text([one] * (most + 1)) == ""


@pytest.mark.parametrize(
    ("kept", "text"), [(KeptKeys.NONE, "41:0-1,42:1-2"), (KeptKeys.ALL, "41:0-1,42:1-2;keys=41")]
)
async def test_an_answer_and_a_streams_last_json_have_them_if_asked(
    kept: KeptKeys, text: str
) -> None:
    for path in ("/plain", "/stream"):
        site = Site()
        asking = asyncio.create_task(site.get(path, **SPANS))
        await site.step(41)
        site.go(42, kept)
        await site.step(42)
        await site.end()
        answer = await asking
        if path == "/plain":
            assert answer.headers["x-weightsync-spans"] == text
        else:
            assert "x-weightsync-spans" not in answer.headers
            assert events_of(answer.text)[-1]["weightsync_spans"] == text
            assert events_of(answer.text)[-1]["weightsync_version"] == "41,42"
    assert "x-weightsync-spans" not in (await answer_of(Site(), "/plain", 41)).headers


async def test_sequences_are_in_the_order_of_the_choices() -> None:
    site = Site()
    versions = site.versions(x_weightsync_spans=1)
    with versions.answering():
        # The second prompt came first, and of each the sequences in order.
        for prompt in (1, 0):
            for index in (0, 1):
                name = f"{index}_cmpl-{prompt}-uuid"
                site.llm.ask(
                    name, of=f"cmpl-{prompt}-uuid", index=index, external=f"cmpl-ab12-{prompt}"
                )
    for count, name in enumerate(("0_cmpl-0-uuid", "1_cmpl-0-uuid", "0_cmpl-1-uuid"), start=1):
        site.llm.token(*[name] * count)
    assert spans_text(await versions.spans()) == "41:0-1 41:0-2 41:0-3 -"


async def test_what_has_no_tokens_and_beams_have_none() -> None:
    site = Site()
    pooled, beams = site.versions(x_weightsync_spans=1), site.versions(x_weightsync_spans=1)
    with pooled.answering():
        site.llm.ask("a", pools=True)
    with beams.answering():
        site.llm.ask("b", external="cmpl-0-uuid-beam-3")
    assert await pooled.spans() == await beams.spans() == ()
    assert await site.versions(x_weightsync_spans=1).spans() == ()


async def test_without_labels_they_are_known_while_one_version_is_live() -> None:
    site = Site(labels=False)
    one, two = site.versions(), site.versions()
    with one.answering():
        site.llm.ask("a")
    site.llm.token("a", "a")
    assert spans_text(await one.spans()) == "41:0-2"
    with two.answering():
        site.llm.ask("b")
    site.go(42)
    assert await two.spans() == ()
