"""What a request asks of versions: read from headers and body, and held against what is live."""

from __future__ import annotations

from typing import Any

import pytest

from weightsync.vllm.bridge.live_versions import LiveVersions
from weightsync.vllm.extensions.answers.request_bounds import (
    RequestBounds,
    read_bounds,
    take_fields,
)

NONE = RequestBounds()


def _read(body: dict[str, Any] | None = None, /, **headers: str) -> RequestBounds:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return read_bounds(raw, take_fields(body or {}))


def _live(version: int, newest: int | None = None) -> LiveVersions:
    live = LiveVersions()
    live.begin(version)
    live.confirm()
    live.newest = newest
    return live


@pytest.mark.parametrize(
    ("name", "text", "bounds"),
    [
        ("min_version", "41", RequestBounds(minimum=41)),
        ("exact_version", " 42 ", RequestBounds(exact=42)),
        ("max_lag", "0", RequestBounds(max_lag=0)),
        ("max_span", "1", RequestBounds(max_span=1)),
        ("group", "run:3/".rstrip("/"), RequestBounds(group="run:3")),
        ("spans", "1", RequestBounds(spans=True)),
        ("spans", "0", NONE),
    ],
)
def test_a_header_a_field_and_vllms_extra_arguments_say_the_same(
    name: str, text: str, bounds: RequestBounds
) -> None:
    assert _read(**{f"x_weightsync_{name}": text}) == bounds
    assert _read({f"weightsync_{name}": text}) == bounds
    assert _read({"vllm_xargs": {f"weightsync_{name}": text}}) == bounds
    both = {f"weightsync_{name}": text.strip()}
    assert _read(both, **{f"x_weightsync_{name}": text}) == bounds


def test_fields_may_be_numbers_and_booleans_and_are_taken_out() -> None:
    body = {
        "prompt": "a", "weightsync_exact_version": 42, "weightsync_spans": True,
        "vllm_xargs": {"weightsync_group": "g", "other": 1},
    }  # fmt: skip
    assert _read(body) == RequestBounds(exact=42, spans=True, group="g")
    assert body == {"prompt": "a", "vllm_xargs": {"other": 1}}


@pytest.mark.parametrize("text", ["", "new", "-1", "4.2", "41,42", "1" * 20, "\u0664\u0661"])
@pytest.mark.parametrize("name", ["min_version", "exact_version", "max_lag", "max_span"])
def test_what_is_no_number_is_refused(name: str, text: str) -> None:
    wanted = "send it once, as one whole number"
    with pytest.raises(ValueError, match=f"^x-weightsync-{name.replace('_', '-')} is .*{wanted}"):
        _read(**{f"x_weightsync_{name}": text})
    with pytest.raises(ValueError, match=f"^weightsync_{name} is .*{wanted}"):
        _read({f"weightsync_{name}": text})


@pytest.mark.parametrize("value", [None, 4.2, [42], {"a": 1}, -1, 0])
def test_a_field_of_another_kind_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"^weightsync_exact_version is .*from 1 such as 41"):
        _read({"weightsync_exact_version": value})


@pytest.mark.parametrize("text", ["", "a b", "a/b", "a" * 129, "\u00e9"])
def test_a_group_has_a_plain_name(text: str) -> None:
    with pytest.raises(ValueError, match="as 1 to 128 letters, digits"):
        _read({"weightsync_group": text})


def test_spans_are_wanted_or_not() -> None:
    with pytest.raises(ValueError, match=r"^x-weightsync-spans is 'yes'; send it once, as 1 or 0"):
        _read(x_weightsync_spans="yes")


def test_a_header_and_a_field_that_disagree_are_refused() -> None:
    wanted = "^send one of x-weightsync-max-lag, which is '2', and weightsync_max_lag, which is '3'"
    with pytest.raises(ValueError, match=wanted):
        _read({"weightsync_max_lag": 3}, x_weightsync_max_lag="2")
    with pytest.raises(ValueError, match=r"^send one of weightsync_max_lag"):
        _read({"weightsync_max_lag": 3, "vllm_xargs": {"weightsync_max_lag": 2}})


def test_a_header_that_comes_twice_is_refused() -> None:
    raw = [(b"x-weightsync-max-lag", b"2")] * 2
    with pytest.raises(ValueError, match=r"^x-weightsync-max-lag is '2, 2'; send it once"):
        read_bounds(raw, {})


def test_a_field_that_is_none_of_ours_is_refused_with_those_that_are() -> None:
    with pytest.raises(ValueError, match=r"^leave out 'weightsync_exact', .*weightsync_max_lag"):
        _read({"weightsync_exact": 42})


def test_what_is_live_meets_bounds_or_one_sentence_says_why_not() -> None:
    live = _live(43, newest=47)
    assert NONE.refusal(live) is None
    assert RequestBounds(minimum=43, exact=43, max_lag=4, max_span=1).refusal(live) is None
    refused = RequestBounds(exact=42).refusal(live)
    assert refused is not None
    assert (refused.why, refused.again) == ("exact_version", True)
    assert refused.message == (
        "version 43 is live, and x-weightsync-exact-version asks for 42; leave it out, or try "
        "again when 42 is live"
    )
    refused = RequestBounds(max_lag=3).refusal(live)
    assert refused is not None
    assert refused.message == (
        "the newest version is 47 and 43 is live, more than x-weightsync-max-lag: 3 allows; try "
        "again when a newer one has been applied"
    )
    refused = RequestBounds(minimum=44).refusal(live)
    assert refused is not None
    assert refused.why == "min_version"


def test_a_lag_is_counted_from_what_the_server_told() -> None:
    unknown = RequestBounds(max_lag=9).refusal(_live(43))
    assert unknown is not None
    assert "no weightsync-server has reported which version is the newest" in unknown.message
    # Its own checkpoint is live, and nothing was pushed.
    assert RequestBounds(max_lag=0).refusal(_live(1, newest=0)) is None
    # A version that was applied is newer than what the server last told.
    assert RequestBounds(max_lag=0).refusal(_live(44, newest=43)) is None
    nameless = RequestBounds(max_lag=9).refusal(_live(0, newest=1))
    assert nameless is not None
    assert "the live weights have no number yet" in nameless.message


def test_an_answer_ends_when_a_version_too_many_would_make_it() -> None:
    exact = RequestBounds(exact=41)
    assert exact.lasting
    assert exact.broken((), 41) is exact.broken((41,), 41) is None
    broken = exact.broken((41,), 42)
    assert broken is not None
    assert (
        broken.message
        == "version 42 became live while this answer was made for 41 alone; ask again"
    )
    span = RequestBounds(max_span=2)
    assert span.broken((41,), 42) is span.broken((41, 42), 41) is span.broken((), 43) is None
    broken = span.broken((41, 42), 43)
    assert broken is not None
    assert broken.why == "max_span"
    assert broken.message == (
        "version 43 became live while this answer was made, which would be of 3 versions, more "
        "than x-weightsync-max-span: 2 allows; ask again"
    )
    nameless = exact.broken((41,), 0)
    assert nameless is not None
    assert nameless.message.startswith("weights without a number became live")
    assert not RequestBounds(minimum=41, max_lag=1, spans=True, group="g").lasting
