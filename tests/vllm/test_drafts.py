"""A draft model takes each version together with its target, or stays as it is."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.drafts import joined, make_eagle, make_mtp, without
from tests.support.models import make_checkpoint
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason
from weightsync.failpoints import VARIABLE
from weightsync_client import Client, ClientError, EngineState

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_SERVING_S = 120.0
_PROMPT = "the quick brown fox"


class DraftedSite:
    """A vLLM with a draft and a server beside it.

    Args:
        kind: `eagle`: a draft with a checkpoint of its own; `mtp`: one in the target's; `packed`:
            as `eagle`, and versions are loaded, for the experts of the target are packed.
        tp: Tensor parallel size.
        root: Of all files; a short path.

    Attributes:
        versions: Folders to push: `a` is what the engine starts with, `b` another one.
        fresh: What an engine that has just loaded `b` holds and answers.
    """

    def __init__(self, kind: str, tp: int, root: Path) -> None:
        self.kind, self.root, self.tp = kind, root, tp
        self.versions: dict[str, Path] = {}
        self.vllm, other = (self._made(name, seed) for seed, name in enumerate("ab"))
        self.plan = root / "plan"
        self.vllm.variables = {**self.vllm.variables, VARIABLE: f"@{self.plan}"}
        other.bridge = False
        try:
            other.start()
            self.fresh = self._digests(other), self._answer(other)
        finally:
            other.stop()
        self.server = WeightSyncServer(root / "a-run", root / "state")
        #: What was seen of the engine until it was proved: its state, and whether it answers.
        self.seen: list[tuple[EngineState, bool]] = []

    @property
    def own(self) -> str:
        """What the names of the draft's tensors begin with."""
        return "model.mtp_layers." if self.kind == "mtp" else "draft."

    def _made(self, name: str, seed: int) -> VllmServer:
        options: dict[str, Any] = {"seed": seed, "dtype": "bfloat16"}
        target, draft = self.root / name, None
        spec: dict[str, Any] = {"method": "eagle", "num_speculative_tokens": 1}
        if self.kind == "mtp":
            make_mtp(target, **options)
            spec["method"] = "mtp"
        else:
            arch = "llama" if self.kind == "eagle" else "qwen3_moe"
            make_checkpoint(target, arch, **options)
            draft = make_eagle(self.root / f"{name}-draft", **options)
            spec["model"] = str(draft)
        packed = {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": "linear"} if self.kind == "packed" else {}
        self.versions[name] = joined(self.root / f"{name}-version", target, draft)
        return VllmServer(
            target,
            self.root / f"{name}-run",
            tp=self.tp,
            dtype="bfloat16",
            flags=[
                "--speculative-config",
                json.dumps(spec),
                "--enable-prompt-tokens-details",
                "--worker-extension-cls",
                "tests.support.draft_extension.DraftExtension",
            ],
            variables={"VLLM_SERVER_DEV_MODE": "1", **packed},
        )

    def start(self) -> None:
        """Start both."""
        self.server.start()
        self.vllm.start()
        deadline = time.monotonic() + _SERVING_S
        with self.client() as client:
            while (state := client.status().models[0].engine.state) is not EngineState.SERVING:
                assert time.monotonic() < deadline, state
                self.seen.append((state, self.vllm.answers()))
                time.sleep(0.05)

    def stop(self) -> None:
        """Stop both."""
        try:
            self.server.stop()
        finally:
            self.vllm.stop()

    def digests(self) -> list[dict[str, str]]:
        """Return what the draft of each rank holds."""
        return self._digests(self.vllm)

    def answer(self) -> Any:
        """Ask it."""
        return self._answer(self.vllm)

    def client(self) -> Client:
        """Return a trainer."""
        return Client(self.server.address)

    @staticmethod
    def _digests(vllm: VllmServer) -> list[dict[str, str]]:
        status, reply = vllm.request("/collective_rpc", {"method": "draft_digests"})
        assert status == 200, reply
        found: list[dict[str, str]] = reply["results"]
        assert all(found), "no parameter is the draft's alone"
        return found

    @staticmethod
    def _answer(vllm: VllmServer) -> Any:
        body = {"model": "model", "prompt": _PROMPT, "max_tokens": 8, "temperature": 0}
        status, answer = vllm.request("/v1/completions", body)
        assert status == 200, answer
        return answer["choices"][0]["text"]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("eagle", 1), marks=pytest.mark.battery),
        ("mtp", 1),
        pytest.param(("packed", 1), marks=pytest.mark.battery),
        pytest.param(("eagle", 2), marks=pytest.mark.battery),
        pytest.param(("mtp", 2), marks=pytest.mark.battery),
        pytest.param(("packed", 2), marks=pytest.mark.battery),
    ],
    ids=lambda value: f"{value[0]}-tp{value[1]}",
)
def site(
    request: pytest.FixtureRequest,
) -> Iterator[DraftedSite]:
    with tempfile.TemporaryDirectory(prefix="wd-") as root:
        kind, tp = request.param
        site = DraftedSite(kind, tp, Path(root))
        try:
            site.start()
            yield site
        finally:
            site.stop()


def test_a_load_is_proved_before_the_engine_answers(site: DraftedSite) -> None:
    if site.kind == "packed":
        assert EngineState.PROVING in [state for state, _ in site.seen]
    # The last look may have been answered when the proof had just come.
    assert not any(answers for _, answers in site.seen[:-1])
    with site.client() as client:
        (model,) = client.status().models
    transform = "twin" if site.kind == "packed" else "plan"
    assert {str(rank.transform) for rank in model.engine.ranks} == {transform}
    assert model.live_version == 1


def _live(site: DraftedSite, name: str, folder: Path | None = None) -> None:
    with site.client() as trainer:
        version = trainer.push(folder or site.versions[name]).version
        trainer.apply(version)
        assert trainer.verify().verified


def test_both_become_what_a_fresh_engine_loads_and_go_back(site: DraftedSite) -> None:
    before = site.digests(), site.answer()
    assert before != site.fresh
    _live(site, "b")
    assert (site.digests(), site.answer()) == site.fresh
    with site.client() as trainer:
        trainer.rollback(reason="test")
    assert (site.digests(), site.answer()) == before


def test_no_cached_key_of_either_crosses_a_version(site: DraftedSite) -> None:
    tokens = [10 + at % 200 for at in range(0, 900, 3)]

    def asked(**more: str) -> tuple[str, int]:
        body = {"model": "model", "prompt": tokens, "max_tokens": 8, "temperature": 0, **more}
        status, answer = site.vllm.request("/v1/completions", body)
        assert status == 200, answer
        cached = (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return answer["choices"][0]["text"], cached

    for at, name in enumerate("baba"):
        _live(site, name)
        text, cached = asked()
        assert (cached > 0) == (at > 1), "keys of a version that returned are found, and no others"
        again, found = asked()
        assert (again, found > 0) == (text, True)
        assert asked(cache_salt=f"unused{at}") == (text, 0)


def test_a_rank_that_fails_leaves_both_as_they_were(site: DraftedSite) -> None:
    _live(site, "a")
    before = site.digests(), site.answer()
    site.plan.write_text("worker.written=1*error")
    with site.client() as trainer, pytest.raises(ClientError):
        trainer.apply(trainer.push(site.versions["b"]).version)
    site.plan.unlink()
    site.server.wait_serving(_SERVING_S)
    assert (site.digests(), site.answer()) == before


def test_a_version_without_a_draft_leaves_it_as_it_is(site: DraftedSite) -> None:
    _live(site, "a")
    draft = site.digests()
    target = without(site.root / "target", site.versions["b"], site.own)
    if site.kind == "packed":
        # What is loaded is exchanged as one.
        with site.client() as trainer, pytest.raises(ClientError, match="lacks these tensors"):
            trainer.apply(trainer.push(target).version)
        assert site.digests() == draft
        return
    _live(site, "", target)
    assert site.digests() == draft
    assert site.answer() == site.fresh[1]
    # A version that brings one comes, and goes.
    _live(site, "b")
    assert site.digests() == site.fresh[0]
    with site.client() as trainer:
        trainer.rollback(reason="test")
        assert trainer.verify().verified
    assert site.digests() == draft
    assert site.answer() == site.fresh[1]


def test_a_part_of_a_draft_is_refused_by_name(site: DraftedSite) -> None:
    layer = f"{site.own}{'0.' if site.kind == 'mtp' else 'layers.0.'}"
    name = f"{layer}self_attn.o_proj.weight"
    part = without(site.root / "part", site.versions["b"], name)
    before = site.digests(), site.answer()
    with site.client() as trainer, pytest.raises(ClientError, match=name) as caught:
        trainer.apply(trainer.push(part).version)
    assert caught.value.reason is Reason.ENGINE_REFUSED
    assert (site.digests(), site.answer()) == before
