"""A real vLLM of two pipeline stages, and one of two engine cores: all ranks as one, or none.

The last rank fails, lies or dies. What is answered is compared with a fresh engine of one rank. The
model has a tied head, so that both stages load the embedding.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest
from safetensors.torch import load_file, save_file

from tests.support.faulty_site import FaultySite, running_site
from tests.support.models import make_checkpoint
from tests.support.stock import push_folder
from tests.support.vllm_server import VllmServer
from weightsync.engine import BETWEEN_STEPS
from weightsync.errors import Reason
from weightsync.v1 import weightsync_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from weightsync.errors import WeightSyncError

pytestmark = [pytest.mark.vllm, pytest.mark.battery, pytest.mark.timeout(900)]

PROMPTS = ("The quick brown", "Weights move from the trainer", "One two three four five")
#: Sizes and ranks.
SITES: dict[str, tuple[dict[str, int], tuple[str, str]]] = {
    "stages": ({"pp": 2}, ("0/0/0", "0/1/0")),
    "cores": ({"dp": 2}, ("0/0/0", "1/0/0")),
}
#: What is compared with an engine that is not compiled needs no rounding in its way.
MODEL: dict[str, Any] = {"dtype": "float32", "tied": True}


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], list[Any]]:
    """Return what gives the answers of a fresh engine of the second checkpoint; it runs once."""
    found: list[Any] = []

    def answers() -> list[Any]:
        if not found:
            folder = tmp_path_factory.mktemp("fresh")
            model = make_checkpoint(folder / "b", seed=1, **MODEL)
            vllm = VllmServer(model, folder, dtype="float32", bridge=False)
            try:
                found.extend(_tokens(vllm.start()))
            finally:
                vllm.stop()
        return found

    return answers


@pytest.fixture(scope="module", params=SITES)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def site(kind: str) -> Iterator[FaultySite]:
    sizes, names = SITES[kind]
    with running_site(rank=names[-1], slower=3, **MODEL, **sizes) as site:
        yield site


@pytest.fixture(autouse=True)
def whole(site: FaultySite) -> Iterator[None]:
    """One verified version is served before every test, and nothing was violated after it."""
    site.pause.mode = pb.PAUSE_MODE_KEEP
    site.recover()
    yield
    assert site.violations() == 0


def _tokens(vllm: VllmServer) -> list[Any]:
    """Return what every engine core answers; all of them must answer the same."""
    cores = [core if vllm.dp > 1 else None for core in range(vllm.dp)]
    answers = [[vllm.complete(prompt, 24, core).tokens for prompt in PROMPTS] for core in cores]
    assert all(answer == answers[0] for answer in answers)
    return answers[0]


def _refused(site: FaultySite, plan: str) -> WeightSyncError:
    """Apply while the last rank fails; return the refusal, with the version before served again."""
    old = site.ask()
    version = site.push()
    with site.watched():
        site.arm(plan)
        refusal = site.try_apply(version)
        assert len(site.met()) == 1, site.met()
        site.recover()
    assert refusal is not None
    assert set(site.served) <= {old, "503", "500", "away"}
    assert site.ask() == old
    return refusal


def test_all_ranks_take_a_version_and_go_back_as_one(
    site: FaultySite, kind: str, fresh: Callable[[], list[Any]]
) -> None:
    names = list(SITES[kind][1])
    if site.ask() != "a":
        site.apply(site.push("a"))
    before = _tokens(site.vllm)
    version = site.push("b")
    with site.watched():
        report = site.apply(version)
    assert set(site.served) <= {"a", "b"}
    assert [rank.rank for rank in report.ranks] == names
    assert len({rank.content_digest for rank in report.ranks}) == 1
    after = _tokens(site.vllm)
    proof = site.server.stub.VerifyVersion(pb.VerifyVersionRequest(model="default"), timeout=60)
    assert proof.verified
    assert [rank.rank for rank in proof.ranks] == names
    request = pb.RollbackRequest(model="default")
    assert site.server.stub.Rollback(request, timeout=60).report.version != version
    assert _tokens(site.vllm) == before != after
    assert fresh() == after


def test_all_ranks_are_seen(site: FaultySite, kind: str) -> None:
    model = site.server.wait_serving()
    assert [rank.rank for rank in model.engine.ranks] == list(SITES[kind][1])
    assert {rank.version for rank in model.engine.ranks} == {model.live_version}
    command = [sys.executable, "-m", "weightsync_client.cli", "--address", site.server.address]
    done = subprocess.run(
        [*command, "status"], capture_output=True, text=True, timeout=60, check=True
    )
    for name in SITES[kind][1]:
        assert f"rank {name}: version {model.live_version}" in done.stdout


def test_a_rank_that_fails_takes_all_back(site: FaultySite) -> None:
    refusal = _refused(site, "worker.half=1*error(ENOMEM)")
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "Cannot allocate memory" in refusal.message
    assert not {"503", "500", "away"} & set(site.served)


def test_a_rank_that_lies_takes_all_back(site: FaultySite) -> None:
    refusal = _refused(site, "worker.reply=1*lie(content_digest)")
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "proved falsified" in refusal.message


def test_a_rank_that_answers_for_another_one_is_not_believed(site: FaultySite) -> None:
    refusal = _refused(site, "worker.reply=1*lie(rank=0/0/0)")
    assert refusal.reason is Reason.APPLY_RESTORED
    assert "answered as rank '0/0/0'" in refusal.message


def test_nothing_changes_between_two_steps(site: FaultySite) -> None:
    assert BETWEEN_STEPS not in site.server.wait_serving().engine.capabilities
    site.pause.mode = pb.PAUSE_MODE_BETWEEN_STEPS
    refusal = site.try_apply(site.push())
    assert refusal is not None
    assert refusal.reason is Reason.ENGINE_REFUSED
    assert "pipeline stages or data parallel ranks" in refusal.message


def _with_head(site: FaultySite, target: Path, scale: float) -> Path:
    """Copy the checkpoint that is not live with an output head of its own."""
    source = site.folders["b" if site.ask() == "a" else "a"]
    shutil.copytree(source, target)
    for index in target.glob("*.index.json"):
        index.unlink()
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        if "model.embed_tokens.weight" in tensors:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * scale
            save_file(tensors, file)
    return target


def test_a_head_that_no_rank_loads_must_repeat_the_embedding(
    site: FaultySite, tmp_path: Path
) -> None:
    old = site.ask()
    other = _with_head(site, tmp_path / "untied", 2.0)
    refusal = site.try_apply(push_folder(site.server.stub, other).version)
    assert refusal is not None
    assert refusal.reason is Reason.ENGINE_REFUSED
    assert "lm_head.weight" in refusal.message
    assert site.ask() == old
    tied = _with_head(site, tmp_path / "tied", 1.0)
    version = push_folder(site.server.stub, tied).version
    site.content[version] = "b" if old == "a" else "a"
    assert len(site.apply(version).ranks) == 2
    assert site.ask() == site.content[version]


def test_last_a_rank_that_dies_takes_the_engine_with_it(site: FaultySite, kind: str) -> None:
    old = site.ask()
    version = site.push()
    with site.watched():
        site.arm("worker.half=1*panic")
        refusal = site.try_apply(version)
        assert len(site.met()) == 1, site.met()
        deadline = time.monotonic() + 60
        while site.vllm_lives():
            assert time.monotonic() < deadline, "vLLM lives on without one of its ranks"
            time.sleep(0.1)
    assert refusal is not None
    assert refusal.reason is Reason.ENGINE_FENCED
    assert set(site.served) <= {old, "503", "500", "away"}
    if kind == "stages":
        # vLLM is started again, and gets what was live before it serves.
        assert site.recover() == old
