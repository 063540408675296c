"""TRL's own rollout loop, with the versions of answers over HTTP in its samples.

The loop and its group are those of the installed TRL; the answers come from a server that says
which version made them, and what a version is comes from a real gRPC server.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import threading
import warnings
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from weightsync_client import Client, InvalidError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.unit.client.servicer import Running

pytest.importorskip("trl")
aiohttp = pytest.importorskip("aiohttp")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of TRL's, about what else is installed.
    rollouts = pytest.importorskip("weightsync_client.integrations.trl_rollouts")
    worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker")

#: Version 40 was live when the worker began, with sync 3 of this run and TRL's counter at 5.
FIRST, SYNC, COUNTER = 40, 3, 5


class _Engine(BaseHTTPRequestHandler):
    #: What made each answer, in order.
    versions: list[str]

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        choice = {"token_ids": [1, 2], "logprobs": {"token_logprobs": [-0.1, -0.2]}}
        body = json.dumps({"choices": [choice]}).encode()
        self.send_response(200)
        self.send_header("x-weightsync-version", self.versions.pop(0))
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def engine() -> Iterator[tuple[str, type[_Engine]]]:
    handler = type("Engine", (_Engine,), {"versions": []})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", handler
    server.shutdown()
    server.server_close()
    thread.join(5)


@pytest.fixture(autouse=True)
def versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each version after the first one is one sync more."""

    def get_version(self: Client, version: int = 0) -> Any:
        version = version or FIRST
        return SimpleNamespace(
            version=version, metadata={"sync": str(SYNC + version - FIRST), "run_id": "r"}
        )

    monkeypatch.setattr(Client, "get_version", get_version)


def _tokenizer() -> Any:
    tokenizer = SimpleNamespace(response_template="x", response_schema=None, pad_token_id=0)
    tokenizer.apply_chat_template = lambda *args, **options: [7, 8, 9]
    return tokenizer


@contextlib.contextmanager
def _loop(url: str, address: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give the loop as TRL's child process makes it, without the process."""
    # As the child does, for its log.
    pytest.importorskip("accelerate").PartialState()
    message = {"role": "assistant", "content": "hello"}
    monkeypatch.setattr(worker, "parse_response", lambda *args, **options: dict(message))
    made = rollouts._Loop(
        weightsync=(address, FIRST, COUNTER - SYNC),
        model_name="m",
        dataset=[{"prompt": [{"role": "user", "content": "a"}]}],
        reward_funcs=[lambda **facts: [1.0] * len(facts["prompts"])],
        processing_class=_tokenizer(),
        eos_token_ids=[2],
        rollout_buffer=queue.Queue(),
        model_version_value=SimpleNamespace(value=COUNTER),
        heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(),
        exception_info_queue=queue.Queue(),
        metrics_queue=queue.Queue(),
        num_generations=2,
        vllm_server_url=url,
    )
    yield made
    # What ends with the process.
    made._loop.close()
    made._tool_pool.shutdown()
    made._syncs._client.close()


async def _samples(loop: Any, answers: int, group_id: int) -> list[Any]:
    """Generate a group's conversations and score them, as TRL's two loops do."""
    prompt = [{"role": "user", "content": "a"}]
    loop.session = aiohttp.ClientSession()
    try:
        done = []
        for _ in range(answers):
            call = loop._generate_one(prompt, tool_dict={}, tools=[], group_id=group_id)
            done.append(await asyncio.create_task(call))
    finally:
        await loop.session.close()
    group = worker.RolloutGroup(
        prompts=[prompt] * answers,
        reward_kwargs={},
        completions=[one[0] for one in done],
        completions_ids=[one[1] for one in done],
        completions_sequences=[one[2] for one in done],
        tool_call_counts=[0] * answers,
        tool_failure_counts=[0] * answers,
        model_version=COUNTER,
        group_id=group_id,
        env_rewards=[None] * answers,
        rollout_rewards=[None] * answers,
    )
    return list(await loop._score_group(group))


@pytest.mark.parametrize(
    ("answers", "count"),
    [
        (["40", "40"], COUNTER),
        (["41", "42"], COUNTER + 1),
        (["42", "41,42"], COUNTER + 1),
        (["43"], COUNTER + 3),
        # Of before this run: older than all of it.
        (["39,40", "41"], COUNTER - 1),
    ],
)
def test_samples_have_trls_count_of_the_oldest_version_that_answered(
    engine: tuple[str, type[_Engine]],
    running: Running,
    monkeypatch: pytest.MonkeyPatch,
    answers: list[str],
    count: int,
) -> None:
    url, handler = engine
    handler.versions = list(answers)
    with _loop(url, running.address, monkeypatch) as loop:
        samples = asyncio.run(_samples(loop, len(answers), group_id=9))
        assert [sample.model_version for sample in samples] == [count] * len(answers)
        assert not loop._oldest


@pytest.mark.filterwarnings("ignore:TRL currently supports vLLM versions:UserWarning")
def test_the_worker_starts_from_the_sync_that_is_live(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker.AsyncRolloutWorker, "start", lambda self: None)
    made = rollouts.WeightSyncRollouts(weightsync_server=running.address)
    made.update_model_version(COUNTER)
    made.start()
    assert made._loop_kwargs["weightsync"] == (running.address, FIRST, COUNTER - SYNC)
    assert made._loop_cls is rollouts._Loop
    plain = SimpleNamespace(version=1, metadata={})
    monkeypatch.setattr(Client, "get_version", lambda self: plain)
    with pytest.raises(InvalidError, match=r"^give WeightSyncTransfer as the trainer's"):
        made.start()
