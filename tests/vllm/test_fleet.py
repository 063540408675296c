"""A real vLLM in a fleet: what its HTTP clients see of a barrier, a lost register and server."""

from __future__ import annotations

import contextlib
import shutil
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.fleet_registers import FolderPlace
from tests.support.following import FollowingServer, until
from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, ClientError

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
]

_VERSION = "x-weightsync-version"
_BODY = {"model": "model", "prompt": "The quick", "max_tokens": 8, "ignore_eos": True}


@dataclass
class _Fleet:
    """Two members: `vllm` takes the pushes, `other` has the engine for tests, and coordinates."""

    place: FolderPlace
    vllm: VllmServer
    server: WeightSyncServer
    other: FollowingServer
    weights: list[Path]


def _flags(place: FolderPlace, name: str) -> list[str]:
    return [
        *("--fleet", "f", "--fleet-register", place.url, "--fleet-member", name),
        *("--undecided-limit-s", "3", "--max-age-s", "6", "--slots", "3"),
    ]


@pytest.fixture(scope="module")
def fleet() -> Iterator[_Fleet]:
    # Unix sockets allow 107 bytes, which pytest's own folders exceed.
    root = Path(tempfile.mkdtemp(prefix="wf"))
    place = FolderPlace(root)
    weights = [make_checkpoint(root / f"m{seed}", seed=seed, shard_size="1GB") for seed in (1, 2)]
    vllm = VllmServer(weights[0], root / "v")
    server = WeightSyncServer(root / "v", root / "state", flags=_flags(place, "v"))
    (root / "o").mkdir()
    shutil.copyfile(weights[0] / "model.safetensors", root / "o" / "model.safetensors")
    follow = ["--follow", f"file://{root / 'state' / 'store'}"]
    other = FollowingServer(root / "o", *follow, *_flags(place, "o"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, root, ignore_errors=True)
        stack.callback(server.stop)
        server.start()
        stack.callback(vllm.stop)
        vllm.start()
        yield _Fleet(place, vllm, server, other, weights)


def _ask(vllm: VllmServer) -> tuple[int, str]:
    """Return status and version of one answer; 0: there was none in time, as in a pause."""
    with contextlib.suppress(OSError), vllm.ask("/v1/completions", _BODY, timeout=2) as answer:
        answer.read()
        return answer.status, answer.headers.get(_VERSION, "")
    return 0, ""


def _decided(client: Client) -> Any:
    newest = client.fleet_status().newest
    return newest.decision if newest is not None else ""


def test_a_barrier_changes_what_vllm_answers_and_an_unknown_decision_makes_it_answer_503(
    fleet: _Fleet,
) -> None:
    plan = fleet.other.folder / "plan"
    plan.touch()
    fleet.other.variables["WEIGHTSYNC_FAILPOINTS"] = f"@{plan}"
    with Client(fleet.server.address) as client, ThreadPoolExecutor(1) as pool:
        until(lambda: _ask(fleet.vllm)[0] == 200, "vLLM answers", 120)
        with fleet.other.running() as other:
            until(lambda: len(client.fleet_status().members) == 2, "both are there")
            before, _ = _completed(fleet.vllm)
            second = client.push(fleet.weights[1]).version
            report = client.fleet_apply(second, order="barrier", pause="abort")
            assert (report.decision, [one.done for one in report.members]) == ("COMMIT", [True] * 2)
            after, named = _completed(fleet.vllm)
            assert named == str(second)
            assert after != before

            third = client.push(fleet.weights[0], metadata={"again": "1"}).version
            plan.write_text("fleet.coordinate=1*stop")
            call = pool.submit(other.fleet_apply, third, order="barrier")
            until(plan.with_name("plan.hits").exists, "the coordinator is about to decide")
            fleet.place.down()
            until(lambda: _ask(fleet.vllm)[0] == 503, "a vLLM that cannot know answers 503")
            assert _ask(fleet.vllm)[0] == 503
            fleet.place.up()
            plan.write_text("")
            assert fleet.other.process is not None
            fleet.other.process.send_signal(signal.SIGCONT)
            with contextlib.suppress(ClientError):
                call.result(120)
            until(lambda: _decided(client) != "", "it is decided")
            decided = third if _decided(client) == "COMMIT" else second
            until(lambda: _ask(fleet.vllm) == (200, str(decided)), "vLLM answers with what was")
            assert client.verify().verified


def test_a_vllm_whose_server_is_frozen_answers_503_until_it_is_back(fleet: _Fleet) -> None:
    until(lambda: _ask(fleet.vllm)[0] == 200, "vLLM answers", 120)
    assert fleet.server.process is not None
    fleet.server.process.send_signal(signal.SIGSTOP)
    try:
        until(lambda: _ask(fleet.vllm)[0] == 503, "nobody says that it may serve on")
        status, refusal = fleet.vllm.request("/v1/completions", _BODY)
        assert (status, "weightsync fleet status" in str(refusal)) == (503, True)
    finally:
        fleet.server.process.send_signal(signal.SIGCONT)
    until(lambda: _ask(fleet.vllm)[0] == 200, "vLLM answers again")


def _completed(vllm: VllmServer) -> tuple[list[int], str]:
    """Return the tokens that vLLM generates, and the version that it names."""
    with vllm.ask("/v1/completions", _BODY) as answer:
        named = answer.headers[_VERSION]
    return vllm.complete("The quick").tokens, named
