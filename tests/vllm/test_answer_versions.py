"""Answers of a real vLLM name the versions that made them; requests may ask for a newer one."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.traced import Collector
from tests.support.vllm_fixtures import Bench, running_bench

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.staging import Version

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

#: Enough that an apply comes between two of a long request's tokens.
LAYERS, TOKENS = 12, 240
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

    def apply(self) -> None:
        """Apply the other of the two as the next version."""
        self.live += 1
        at = (self.live - 1) % 2
        version: Version = self.staged[at]
        self.bench.client.apply(version, self.live, apply_id=self.applies[at])

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
    def stream(self, path: str, body: dict[str, Any]) -> Iterator[Any]:
        """Give an open stream whose first event has come."""
        with self.bench.vllm.ask(path, body | {"stream": True}) as answer:
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
    models = checkpoint(seed=1, layers=LAYERS), checkpoint(seed=2, layers=LAYERS)
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
    with site.stream(path, make(2, **more)) as answer:
        assert answer.headers["x-weightsync-version"] == str(site.live)
        assert _events(answer.read().decode())[-1]["weightsync_version"] == str(site.live)


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


def test_a_request_that_spans_an_apply_names_both_versions(site: AnswerSite) -> None:
    answers: list[Any] = []
    before = site.live
    asker = threading.Thread(
        target=lambda: answers.append(site.answer("/v1/completions", _order(TOKENS)))
    )
    asker.start()
    _wait_for(lambda: site.bench.client.health().requests == 1)
    # What was asked for later has a token, so that the first one has.
    with site.stream("/v1/completions", _order(TOKENS)) as later:
        site.apply()
        later.read()
    asker.join(60)
    status, headers, _ = answers[0]
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
