"""Answers of a real vLLM name the versions that made them; requests may ask for a newer one."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import say_one_token
from tests.support.traced import Collector
from tests.support.vllm_fixtures import Bench, running_bench
from weightsync_client import versions_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.staging import Version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Enough that an apply comes between two of a long request's tokens.
LAYERS, TOKENS = 12, 240
#: What each of the two versions says, whatever it is asked: ids of tokens that are letters.
SAYS = 70, 71
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"


class AnswerSite:
    """One vLLM with two prepared versions, of which version 1 was adopted.

    Attributes:
        before_adoption: Status and headers of an answer before a server had proved anything.
    """

    def __init__(self, bench: Bench, models: tuple[Path, Path]) -> None:
        self.bench = bench
        self.staged = tuple(map(bench.staging.stage, models))
        self.before_adoption = self.answer("/v1/completions", _order(1))[:2]
        self.applies = [bench.client.adopt(self.staged[0])]
        apply_id, reports = bench.client.prepare(self.staged[1])
        assert reports[0]["phase"] == "ready", reports
        self.applies.append(apply_id)
        self.live = 1

    def apply(self, *, clear_cache: bool = True) -> None:
        """Apply the other of the two as the next version."""
        self.live += 1
        at = (self.live - 1) % 2
        version: Version = self.staged[at]
        lease = self.bench.client.pause(clear_cache=clear_cache)
        for reply in self.bench.client.commit(self.applies[at]):
            assert reply["content_digest"] == version.content_digest, reply
        self.bench.client.resume(lease, self.live, version.content_digest)

    def said_by(self, tokens: list[int]) -> list[int]:
        """Return which of the two versions made each token: the remainder of its number by 2."""
        return [(SAYS.index(token) + 1) % 2 for token in tokens]

    def switch(self) -> None:
        """Do so between two steps, without a pause."""
        self.live += 1
        at = (self.live - 1) % 2
        new, base = self.staged[at], self.staged[1 - at]
        done = self.bench.client.switch(
            new, self.live, self.applies[at], base, self.applies[1 - at]
        )
        assert done.serves == new.content_digest

    def answer(
        self, path: str, body: dict[str, Any], **headers: str
    ) -> tuple[int, dict[str, str], str]:
        """Return status, headers and body of one call."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.bench.vllm.ask(path, body, named) as answer:
            fields = {name.lower(): value for name, value in answer.headers.items()}
            return answer.status, fields, answer.read().decode()

    @contextlib.contextmanager
    def stream(self, path: str, body: dict[str, Any], **headers: str) -> Iterator[Any]:
        """Give an open stream whose first event has come."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        with self.bench.vllm.ask(path, body | {"stream": True}, named) as answer:
            assert answer.status == 200, answer.read()
            assert answer.readline().startswith(b"data: {")
            yield answer


@pytest.fixture(scope="module")
def collector(run_dir: Path) -> Iterator[Collector]:
    with Collector(run_dir / "spans.jsonl") as made:
        yield made


@pytest.fixture(scope="module")
def site(
    checkpoint: Callable[..., Path], run_dir: Path, collector: Collector
) -> Iterator[AnswerSite]:
    source = checkpoint(seed=1, layers=LAYERS)
    one, two = (say_one_token(source, run_dir / f"says-{token}", token) for token in SAYS)
    models = one, two
    template = run_dir / "chat.jinja"
    template.write_text(TEMPLATE)
    flags = ["--chat-template", str(template), "--otlp-traces-endpoint", collector.endpoint]
    with running_bench(models[0], run_dir, flags=flags) as bench:
        yield AnswerSite(bench, models)


def _order(tokens: int, **more: Any) -> dict[str, Any]:
    return {
        "model": "model", "prompt": "The quick", "max_tokens": tokens, "ignore_eos": True, **more
    }  # fmt: skip


def _chat(tokens: int, **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": "The quick"}]
    return {
        "model": "model", "messages": messages, "max_tokens": tokens, "ignore_eos": True, **more
    }  # fmt: skip


def _events(text: str) -> list[dict[str, Any]]:
    """Return the JSON of a stream's events; it ends as OpenAI's do."""
    assert text.endswith("\n\ndata: [DONE]\n\n")
    lines = [line for line in text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def _text(body: str) -> str:
    text: str = json.loads(body)["choices"][0]["text"]
    return text


def test_the_adopted_checkpoint_is_version_1_and_before_it_there_is_none(site: AnswerSite) -> None:
    status, headers = site.before_adoption
    assert (status, headers.get("x-weightsync-version")) == (503, None)
    with site.bench.vllm.ask("/v1/models") as answer:
        assert answer.headers["x-weightsync-version"] is None


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", _order(4)),
        ("/v1/completions", _order(4, n=2, temperature=1.0)),
        ("/v1/completions", _order(4) | {"prompt": ["One", "Two", "Three"]}),
        ("/v1/chat/completions", _chat(4)),
        ("/v1/responses", {"model": "model", "input": "The quick", "max_output_tokens": 4}),
    ],
)
def test_an_answer_names_the_version_before_and_after_an_apply(
    site: AnswerSite, path: str, body: dict[str, Any]
) -> None:
    for _ in range(2):
        status, headers, text = site.answer(path, body)
        assert (status, headers.get("x-weightsync-version")) == (200, str(site.live)), text
        site.apply()


@pytest.mark.parametrize(
    ("path", "make"), [("/v1/completions", _order), ("/v1/chat/completions", _chat)]
)
@pytest.mark.parametrize("usage", [False, True])
def test_a_stream_names_its_first_version_and_all_at_its_end(
    site: AnswerSite, path: str, make: Callable[..., dict[str, Any]], usage: bool
) -> None:
    more = {"stream_options": {"include_usage": True}} if usage else {}
    before = site.live
    with site.stream(path, make(TOKENS, **more)) as answer:
        assert answer.headers["x-weightsync-version"] == str(before)
        site.apply()
        events = _events(answer.read().decode())
    assert events[-1]["weightsync_version"] == f"{before},{site.live}"
    assert not any("weightsync_version" in event for event in events[:-1])
    assert bool(events[-1].get("usage")) is usage
    # All tokens may come in one event.
    _, headers, text = site.answer(path, make(2, **more) | {"stream": True})
    assert headers["x-weightsync-version"] == str(site.live)
    assert _events(text)[-1]["weightsync_version"] == str(site.live)


def test_a_stream_that_begins_before_its_tokens_names_versions_at_its_end(
    site: AnswerSite,
) -> None:
    body = {"model": "model", "input": "The quick", "max_output_tokens": 8, "stream": True}
    status, headers, text = site.answer("/v1/responses", body)
    assert status == 200, text
    assert "x-weightsync-version" not in headers
    *events, last = [line for line in text.splitlines() if line.startswith("data: {")]
    final = json.loads(last.removeprefix("data: "))
    assert (final["type"], final["weightsync_version"]) == ("response.completed", str(site.live))
    assert not any("weightsync_version" in event for event in events)


def _answered_over_an_apply(
    site: AnswerSite, order: dict[str, Any], requests: int
) -> tuple[int, dict[str, str], str]:
    """Return the answer to an order that vLLM has made `requests` of when the apply comes."""
    answers: list[tuple[int, dict[str, str], str]] = []
    asker = threading.Thread(target=lambda: answers.append(site.answer("/v1/completions", order)))
    asker.start()
    _wait_for(lambda: site.bench.client.health().requests == requests)
    # What was asked for later has a token, so that the first one has.
    with site.stream("/v1/completions", _order(TOKENS)) as later:
        site.apply()
        later.read()
    asker.join(60)
    return answers[0]


def test_a_request_that_spans_an_apply_names_both_versions(site: AnswerSite) -> None:
    before = site.live
    status, headers, _ = _answered_over_an_apply(site, _order(TOKENS), requests=1)
    assert (status, headers["x-weightsync-version"]) == (200, f"{before},{site.live}")


def test_a_request_that_waits_for_an_apply_names_what_came_after(site: AnswerSite) -> None:
    answers: list[Any] = []
    lease = site.bench.client.pause()
    asker = threading.Thread(
        target=lambda: answers.append(site.answer("/v1/completions", _order(4)))
    )
    asker.start()
    _wait_for(lambda: site.bench.client.health().requests == 1)
    site.live += 1
    at = (site.live - 1) % 2
    site.bench.client.commit(site.applies[at])
    site.bench.client.resume(lease, site.live, site.staged[at].content_digest)
    asker.join(60)
    assert answers[0][1]["x-weightsync-version"] == str(site.live)


def test_requests_beside_many_applies_name_each_version_that_they_saw(site: AnswerSite) -> None:
    order = _order(40, temperature=0)
    texts = {}
    for _ in range(2):
        texts[site.live % 2] = _text(site.answer("/v1/completions", order)[2])
        site.apply()
    assert texts[0] != texts[1]
    found: list[tuple[int, str, str]] = []
    ends = threading.Event()

    def ask() -> None:
        while not ends.is_set():
            earliest = site.live
            _, headers, body = site.answer("/v1/completions", order)
            found.append((earliest, headers["x-weightsync-version"], _text(body)))

    askers = [threading.Thread(target=ask) for _ in range(3)]
    for asker in askers:
        asker.start()
    for _ in range(10):
        site.apply()
    ends.set()
    for asker in askers:
        asker.join(60)
    for earliest, header, text in found:
        named = [int(number) for number in header.split(",")]
        assert named == sorted(set(named))
        # The number was that of an apply which may not have come to its pause.
        assert earliest - 1 <= named[0] <= named[-1] <= site.live
        # The weights of one version alone give its text.
        assert len(named) > 1 or text == texts[named[0] % 2]
    assert any("," in header for _, header, _ in found)


def test_a_switch_between_steps_names_both_sides(site: AnswerSite) -> None:
    before = site.live
    with site.stream("/v1/completions", _order(TOKENS)) as answer:
        site.switch()
        events = _events(answer.read().decode())
    assert events[-1]["weightsync_version"] == f"{before},{site.live}"
    _, headers, _ = site.answer("/v1/completions", _order(4))
    assert headers["x-weightsync-version"] == str(site.live)


def test_a_version_that_is_not_live_yet_is_waited_for_by_the_caller(site: AnswerSite) -> None:
    newer = {"x_weightsync_min_version": str(site.live + 1)}
    status, headers, text = site.answer("/v1/completions", _order(2), **newer)
    assert (status, headers["retry-after"]) == (409, "1")
    assert f"version {site.live} is live" in json.loads(text)["error"]["message"]
    site.apply()
    status, headers, _ = site.answer("/v1/completions", _order(2), **newer)
    assert (status, headers["x-weightsync-version"]) == (200, str(site.live))


def test_a_minimum_that_is_no_number_is_refused(site: AnswerSite) -> None:
    status, _, text = site.answer("/v1/completions", _order(2), x_weightsync_min_version="newest")
    assert status == 400
    assert "send it once, as one whole number such as 41" in json.loads(text)["error"]["message"]


def test_an_exact_version_is_refused_while_another_is_live(site: AnswerSite) -> None:
    for body, headers in (
        (_order(2), {"x_weightsync_exact_version": str(site.live + 1)}),
        (_order(2, weightsync_exact_version=site.live + 1), {}),
        (_chat(2, vllm_xargs={"weightsync_exact_version": site.live + 1}), {}),
    ):
        path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
        status, answered, text = site.answer(path, body, **headers)
        assert (status, answered["retry-after"]) == (409, "1")
        assert f"version {site.live} is live" in json.loads(text)["error"]["message"]
    exact = _order(2, weightsync_exact_version=site.live)
    status, answered, text = site.answer("/v1/completions", exact)
    assert (status, answered.get("x-weightsync-version")) == (200, str(site.live)), text
    both = {"x_weightsync_exact_version": str(site.live + 1)}
    assert site.answer("/v1/completions", exact, **both)[0] == 400


@pytest.mark.parametrize("bound", ["exact_version", "max_span"])
@pytest.mark.parametrize(
    ("path", "make"), [("/v1/completions", _order), ("/v1/chat/completions", _chat)]
)
@pytest.mark.parametrize("between_steps", [False, True])
def test_an_open_stream_ends_with_the_error_when_a_switch_breaks_its_bounds(
    site: AnswerSite,
    path: str,
    make: Callable[..., dict[str, Any]],
    bound: str,
    between_steps: bool,
) -> None:
    before = site.live
    value = {"exact_version": before, "max_span": 1}[bound]
    headers = {f"x_weightsync_{bound}": str(value)}
    with site.stream(path, make(TOKENS, return_token_ids=True), **headers) as answer:
        assert answer.headers["x-weightsync-version"] == str(before)
        if between_steps:
            site.switch()
        else:
            site.apply(clear_cache=False)
        *events, last = _events(answer.read().decode())
    assert last["error"]["code"] == 409
    assert last["error"]["message"].startswith(f"version {site.live} became live while this answer")
    tokens = [token for event in events for token in event["choices"][0]["token_ids"] or ()]
    assert set(site.said_by(tokens)) <= {before % 2}
    _wait_for(lambda: site.bench.client.health().requests == 0)


def test_an_answer_in_one_piece_is_refused_when_a_switch_breaks_its_bounds(
    site: AnswerSite,
) -> None:
    order = _order(TOKENS, n=2, weightsync_max_span=1)
    status, headers, text = _answered_over_an_apply(site, order, requests=2)
    assert (status, headers["retry-after"]) == (409, "1")
    assert "which would be of 2 versions" in json.loads(text)["error"]["message"]
    _wait_for(lambda: site.bench.client.health().requests == 0)


def test_a_request_for_one_version_that_waits_for_an_apply_is_of_the_next(site: AnswerSite) -> None:
    answers: list[Any] = []
    order = _order(4, weightsync_max_span=1)
    lease = site.bench.client.pause()
    asker = threading.Thread(target=lambda: answers.append(site.answer("/v1/completions", order)))
    asker.start()
    _wait_for(lambda: site.bench.client.health().requests == 1)
    site.live += 1
    at = (site.live - 1) % 2
    site.bench.client.commit(site.applies[at])
    site.bench.client.resume(lease, site.live, site.staged[at].content_digest)
    asker.join(60)
    assert answers[0][:1] == (200,)
    assert answers[0][1]["x-weightsync-version"] == str(site.live)


@pytest.mark.parametrize("how", ["recompute", "keep", "between_steps"])
def test_spans_are_right_to_the_token(site: AnswerSite, how: str) -> None:
    before = site.live
    order = _order(TOKENS, return_token_ids=True)
    with site.stream("/v1/completions", order, x_weightsync_spans="1") as answer:
        if how == "between_steps":
            site.switch()
        else:
            site.apply(clear_cache=how == "recompute")
        events = _events(answer.read().decode())
    found = versions_of(events[-1])
    assert found.versions == (before, site.live)
    (sequence,) = found.sequences
    if how == "recompute":
        assert sequence.keys == ()
    else:
        # And perhaps of versions before it, whose keys were kept too.
        assert sequence.keys is not None
        assert before in sequence.keys
    per_token = found.per_token()
    assert len(per_token) == TOKENS
    # The first event had been read.
    tokens = [t for event in events for c in event["choices"] for t in c["token_ids"] or ()]
    said = site.said_by(tokens)
    assert [version % 2 for version in per_token[-len(said) :]] == said


def test_spans_of_several_choices_are_in_their_order(site: AnswerSite) -> None:
    site.apply()
    order = _order(3, n=2) | {"prompt": ["One", "Two"]}
    _, headers, _ = site.answer("/v1/completions", order, x_weightsync_spans="1")
    assert headers["x-weightsync-spans"] == " ".join([f"{site.live}:0-3"] * 4)
    found = versions_of(headers)
    assert found.pure
    assert found.per_token(3) == [site.live] * 3
    chat = _chat(3, weightsync_spans=True)
    _, headers, _ = site.answer("/v1/chat/completions", chat)
    assert headers["x-weightsync-spans"] == f"{site.live}:0-3"
    body = {"model": "model", "input": "The quick", "max_output_tokens": 4, "weightsync_spans": 1}
    _, headers, _ = site.answer("/v1/responses", body)
    assert headers["x-weightsync-spans"] == f"{site.live}:0-4"
    beams = _order(3, n=2, use_beam_search=True)
    _, headers, _ = site.answer("/v1/completions", beams, x_weightsync_spans="1")
    assert headers["x-weightsync-version"] == str(site.live)
    assert "x-weightsync-spans" not in headers


def test_a_group_shares_keys_with_nobody_else(site: AnswerSite) -> None:
    site.apply()
    prompt = "Weights move from the trainer into the generator while it runs. " * 20

    def hits(**more: Any) -> float:
        """Return how many tokens of the prompt were found in the cache."""
        before = _metric(site, "vllm:prefix_cache_hits_total")
        order = _order(1, **more) | {"prompt": prompt}
        assert site.answer("/v1/completions", order)[0] == 200
        return _metric(site, "vllm:prefix_cache_hits_total") - before

    first = {"weightsync_group": "trajectory-1"}
    assert hits(**first) == 0
    found = hits(**first)
    assert found > 100
    assert hits() == 0
    assert hits(weightsync_group="trajectory-2") == 0
    assert hits(**first, cache_salt="a user's own") == 0
    assert hits(**first, cache_salt="a user's own") == hits() == found


def test_vllms_metrics_count_answers_and_what_was_refused(site: AnswerSite) -> None:
    site.apply()
    answers = 'weightsync_answers_total{keys="own",versions="one"}'
    refused = 'weightsync_refused_requests_total{why="exact_version"}'
    before = [_metric(site, name) for name in (answers, refused)]
    site.answer("/v1/completions", _order(2))
    site.answer("/v1/completions", _order(2, weightsync_exact_version=site.live + 1))
    after = [_metric(site, name) for name in (answers, refused)]
    assert [new - old for new, old in zip(after, before, strict=True)] == [1, 1]


def _metric(site: AnswerSite, name: str) -> float:
    """Return the sum of a metric's samples that begin so."""
    with site.bench.vllm.ask("/metrics") as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


def test_a_request_that_vllm_refuses_names_nothing(site: AnswerSite) -> None:
    status, headers, _ = site.answer("/v1/completions", _order(2, temperature=-1))
    assert status == 400
    assert "x-weightsync-version" not in headers


def _wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "not within the time"
        time.sleep(0.02)


def test_vllms_spans_of_requests_name_the_version(site: AnswerSite, collector: Collector) -> None:
    pytest.importorskip("opentelemetry.sdk")
    for trace_id in ("1" * 32, "2" * 32):
        site.apply()
        header = f"00-{trace_id}-{'a' * 16}-01"
        assert site.answer("/v1/completions", _order(2), traceparent=header)[0] == 200
        (span,) = collector.trace(trace_id, bool)
        assert (span["name"], span["parent"]) == ("llm_request", "a" * 16)
        assert span["attributes"]["weightsync.version"] == site.live
