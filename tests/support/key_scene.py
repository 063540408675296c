"""One vLLM of which each version's own logprobs are known, for tests of cached keys."""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from tests.support.staging import Version
    from tests.support.vllm_fixtures import Bench

#: Largest difference of two logprobs that fp32 computed from the same keys in another order: up to
#: 2e-4 with the logits of 20 that these models have. Keys of another version make it more than 0.1.
NOISE = 1e-3
#: Tokens of a prompt and its answer: as many as the tests' models know, so that a request is in
#: flight for longer than a change takes.
LENGTH = 1024
LENGTH_FLAGS = ("--max-model-len", str(LENGTH))


@dataclass
class Answer:
    """Tokens with their logprobs, and how many of the prompt's tokens were found in the cache."""

    tokens: list[str]
    logprobs: list[float]
    cached: int
    versions: str

    @classmethod
    def read(cls, headers: Any, body: bytes) -> Answer:
        document = json.loads(body)
        (choice,) = document["choices"]
        details = document["usage"].get("prompt_tokens_details") or {}
        return cls(
            choice["logprobs"]["tokens"],
            choice["logprobs"]["token_logprobs"],
            details.get("cached_tokens") or 0,
            headers["x-weightsync-version"] or "",
        )


@dataclass
class KeyScene:
    """Applies the staged versions in turn, and asks for logprobs.

    Attributes:
        bench: The vLLM and its bridge.
        staged: The versions, number 1 first; number 1 was adopted.
        live: Which of them is live, from 1.
        number: The last version number that was given.
        noise: Largest difference of two logprobs that are the same.
    """

    bench: Bench
    staged: list[Version]
    applies: list[str] = field(default_factory=list)
    live: int = 1
    number: int = 1
    noise: float = NOISE

    @classmethod
    def of(cls, bench: Bench, models: list[Path]) -> KeyScene:
        scene = cls(bench, [bench.staging.stage(model) for model in models])
        scene.applies.append(bench.client.adopt(scene.staged[0]))
        for version in scene.staged[1:]:
            apply_id, reports = bench.client.prepare(version)
            assert all(report["phase"] == "ready" for report in reports), reports
            scene.applies.append(apply_id)
        return scene

    def apply(self, which: int, cache: str, mode: str = "keep") -> None:
        """Make the staged version `which`, from 1, live by a pause."""
        self.number += 1
        version = self.staged[which - 1]
        self.bench.client.apply(
            version, self.number, apply_id=self.applies[which - 1], cache=cache, mode=mode
        )
        self.live = which

    @contextlib.contextmanager
    def paused(self, which: int, cache: str) -> Iterator[str]:
        """Have the staged version written in a pause, whose lease is given, and resume on it."""
        client, version = self.bench.client, self.staged[which - 1]
        self.number += 1
        lease = client.pause(cache=cache)
        if which != self.live:
            (reply,) = {reply["content_digest"] for reply in client.commit(self.applies[which - 1])}
            assert reply == version.content_digest
        yield lease
        client.resume(lease, self.number, version.content_digest)
        self.live = which

    def switch(self, which: int, cache: str) -> None:
        """Make it live between two steps."""
        self.number += 1
        new, base = self.staged[which - 1], self.staged[self.live - 1]
        done = self.bench.client.switch(
            new, self.number, self.applies[which - 1], base, self.applies[self.live - 1],
            cache=cache,
        )  # fmt: skip
        assert done.serves == new.content_digest
        self.live = which

    def ask(self, prompt: list[int], tokens: int, **more: Any) -> Answer:
        """Return the answer to a prompt of token ids."""
        body = {
            "model": "model", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0.0, "logprobs": 0, "return_tokens_as_token_ids": True, **more,
        }  # fmt: skip
        with self.bench.vllm.ask("/v1/completions", body) as answer:
            content = answer.read()
            assert answer.status == 200, content
            return Answer.read(answer.headers, content)

    def fresh(self, prompt: list[int], tokens: int) -> Answer:
        """Return it under a salt that nobody has used, so that no key is found."""
        answer = self.ask(prompt, tokens, cache_salt=secrets.token_hex(8))
        assert answer.cached == 0
        return answer

    def right(self, prompt: list[int], tokens: int = 4, **more: Any) -> Answer:
        """Ask with the cache; fail unless it is what the live version alone answers."""
        answer, own = self.ask(prompt, tokens, **more), self.fresh(prompt, tokens)
        assert answer.tokens == own.tokens, (self.live, answer, own)
        self.same(answer.logprobs, own.logprobs)
        return answer

    def same(self, found: list[float], wanted: list[float]) -> None:
        """Fail where they differ by more than the noise."""
        assert len(found) == len(wanted)
        worst = max(abs(a - b) for a, b in zip(found, wanted, strict=True))
        assert worst <= self.noise, (worst, found, wanted)

    def score(self, tokens: list[int], start: int) -> list[float]:
        """Return the live version's own logprobs of the tokens from `start` on."""
        body = {
            "model": "model", "prompt": tokens, "max_tokens": 1, "prompt_logprobs": 0,
            "cache_salt": secrets.token_hex(8),
        }  # fmt: skip
        with self.bench.vllm.ask("/v1/completions", body) as answer:
            (choice,) = json.loads(answer.read())["choices"]
        entries = choice["prompt_logprobs"][start:]
        return [
            entry[str(token)]["logprob"]
            for entry, token in zip(entries, tokens[start:], strict=True)
        ]

    def wait_for_requests(self, count: int) -> None:
        """Return once so many run or wait."""
        deadline = time.monotonic() + 60
        while self.bench.client.health().requests < count:
            assert time.monotonic() < deadline
            time.sleep(0.005)

    def begin(self, *prompts: list[int], wait: bool = True) -> list[Running]:
        """Ask for as many tokens as vLLM gives; with `wait`, return once each has one.

        Args:
            prompts: Token ids of each request's prompt.
            wait: Whether to return once each has a token; more than run at once never do.
        """
        running = [Running(self, prompt) for prompt in prompts]
        for one in running if wait else ():
            one.answers()
        return running


class Running:
    """A request that is in flight until `end`, unless what vLLM holds of a request is full."""

    def __init__(self, scene: KeyScene, prompt: list[int]) -> None:
        self.prompt = prompt
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self._first = threading.Event()
        self._last: int | None = None
        self._thread = threading.Thread(target=self._read, args=(scene,))
        self._thread.start()

    def answers(self) -> None:
        """Return once there is a token."""
        assert self._first.wait(60)
        assert self.tokens

    def _read(self, scene: KeyScene) -> None:
        # All of it fits as a prompt as well.
        tokens = LENGTH - 1 - len(self.prompt)
        body = {
            "model": "model", "prompt": self.prompt, "max_tokens": tokens, "ignore_eos": True,
            "temperature": 0.0, "logprobs": 0, "return_tokens_as_token_ids": True,
            "stream": True,
        }  # fmt: skip
        with scene.bench.vllm.ask("/v1/completions", body) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    (choice,) = json.loads(line[6:])["choices"]
                    self.tokens += [int(one.split(":")[1]) for one in choice["logprobs"]["tokens"]]
                    self.logprobs += choice["logprobs"]["token_logprobs"]
                    self._first.set()
                    if self._last is not None and len(self.tokens) >= self._last:
                        # vLLM aborts what nobody reads.
                        break
        self._first.set()

    def end(self, more: int = 32) -> Running:
        """Close it after so many more tokens."""
        self._last = len(self.tokens) + more
        self._thread.join(120)
        assert not self._thread.is_alive()
        return self
