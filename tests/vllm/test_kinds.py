"""Models whose loading computes: served as a fresh engine would hold them, or refused by name."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.support.models import add_copy, make_checkpoint, make_int4, make_int8, make_scaled_cache
from tests.support.processors import (
    HAS_AMX,
    HAS_FP8_CACHE,
    LACKS_AMX,
    LACKS_FP8_CACHE,
    without_amx,
)
from tests.support.vllm_server import VllmServer
from tests.support.weightsync_server import WeightSyncServer
from weightsync.errors import Reason, WeightSyncError
from weightsync_client import Client, EngineState, Transform

if TYPE_CHECKING:
    from collections.abc import Iterator

    from _pytest.mark import ParameterSet

    from tests.support.completion import Completion

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

_SERVING_S = 480.0


class KindSite:
    """Two checkpoints of a kind, and a vLLM with a server that started with the first.

    Args:
        kind: What they are.
        sizes: How many ranks vLLM has.
        root: For all of it.
        amx: Whether the processor is one with AMX.
    """

    def __init__(self, kind: str, sizes: dict[str, int], root: Path, *, amx: bool) -> None:
        self.sizes, self.root, self.amx = sizes, root, amx
        self.processor = {} if amx == HAS_AMX else without_amx(root / "plugins")
        self.plain = kind != "packed"
        self.dtype = "float32" if kind == "packed" else "bfloat16"
        arch = {"mla": "deepseek_v2", "scales": "llama"}.get(kind, "qwen2")
        self.folders = {}
        for seed, name in enumerate("ab"):
            # Scales alone are to make a difference.
            same = 0 if kind == "scales" else seed
            made = make_checkpoint(root / name, arch, seed=same, dtype=self.dtype)
            self.folders[name] = _quantised(made, kind)
        self.vllm = self._vllm("a")
        self.server = WeightSyncServer(root / "a-run", root / "state")

    def _vllm(self, name: str, *, bridge: bool = True) -> VllmServer:
        return VllmServer(
            self.folders[name],
            self.root / f"{name}-run",
            tp=self.sizes.get("tp", 1),
            dp=self.sizes.get("dp", 1),
            dtype=self.dtype,
            plain=self.plain,
            bridge=bridge,
            flags=["--worker-extension-cls", "tests.support.live_extension.LiveExtension"],
            variables={"VLLM_SERVER_DEV_MODE": "1", **self.processor},
        )

    def fresh(self, name: str) -> list[dict[str, str]]:
        """Return what a vLLM holds that has just loaded a checkpoint."""
        return self.fresh_answers(name)[0]

    def fresh_answers(
        self, name: str, *prompts: str
    ) -> tuple[list[dict[str, str]], list[Completion]]:
        """Return what a vLLM holds, and answers, that has just loaded a checkpoint."""
        vllm = self._vllm(name, bridge=False)
        try:
            vllm.start()
            return self.digests(vllm), [vllm.complete(prompt) for prompt in prompts]
        finally:
            vllm.stop()

    @staticmethod
    def digests(vllm: VllmServer) -> list[dict[str, str]]:
        """Return what every rank of a vLLM holds."""
        status, reply = vllm.request("/collective_rpc", {"method": "live_digests"})
        assert status == 200, reply
        found: list[dict[str, str]] = reply["results"]
        return found

    def settled(self) -> tuple[EngineState, str]:
        """Wait until the engine is served or refused for good; return that and why."""
        deadline = time.monotonic() + _SERVING_S
        with Client(self.server.address) as client:
            while True:
                engine = client.status().models[0].engine
                if engine.state in (EngineState.SERVING, EngineState.FENCED):
                    return engine.state, engine.reason
                assert time.monotonic() < deadline, engine
                time.sleep(0.05)

    def transforms(self) -> set[Transform]:
        """Return what versions go through on their way to the ranks."""
        with Client(self.server.address) as client:
            (model,) = client.status().models
        return {rank.transform for rank in model.engine.ranks}

    def stop(self) -> None:
        """Stop both."""
        try:
            self.server.stop()
        finally:
            self.vllm.stop()


def _quantised(made: Path, kind: str) -> Path:
    if kind == "int8":
        return make_int8(made, made.with_name(f"{made.name}8"))
    if kind == "scales":
        scales = (1.0, 1.0) if made.name == "a" else (0.02, 0.05)
        scaled = make_scaled_cache(made, made.with_name(f"{made.name}s"), scales)
        if made.name == "a":
            # What vLLM has read is adopted, whichever copy the index prefers.
            add_copy(scaled, "model.norm.weight")
        return scaled
    if kind in ("gptq", "awq"):
        return make_int4(made, made.with_name(f"{made.name}4"), kind)
    return made


def _site(
    kind: str, *, amx: bool | None = None, battery: bool = False, **sizes: int
) -> ParameterSet:
    """Return a site to test with.

    Args:
        kind: Of the checkpoints.
        amx: Whether the processor has AMX, where that decides what is seen; None: it does not.
        battery: Whether CI leaves it out.
        **sizes: How many ranks vLLM has.
    """
    marks = [pytest.mark.battery] if battery else []
    if amx and not HAS_AMX:
        marks.append(pytest.mark.skip(reason=LACKS_AMX))
    ranks = "".join(f"{name}{size}" for name, size in sizes.items()) or "tp1"
    about = {None: "", True: "-amx", False: "-no-amx"}[amx]
    given = kind, sizes, HAS_AMX if amx is None else amx
    return pytest.param(given, marks=marks, id=f"{kind}-{ranks}{about}")


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[KindSite]:
    kind, sizes, amx = request.param
    with tempfile.TemporaryDirectory(prefix="wk-") as root:
        site = KindSite(kind, sizes, Path(root), amx=amx)
        try:
            site.server.start()
            site.vllm.start()
            yield site
        finally:
            site.stop()


def _becomes(site: KindSite) -> None:
    """Apply the second checkpoint and go back; each is what a fresh engine of it holds."""
    before = site.digests(site.vllm)
    with Client(site.server.address) as trainer:
        trainer.apply(trainer.push(site.folders["b"]).version)
        assert trainer.verify().verified
        after = site.digests(site.vllm)
        trainer.rollback(reason="test")
    assert site.digests(site.vllm) == before
    site.vllm.stop()
    assert after == site.fresh("b")
    assert after != before


@pytest.mark.parametrize(
    "site",
    [
        *(_site("mla", amx=amx, battery=True) for amx in (True, False)),
        *(_site("mla", amx=amx, battery=True, tp=2) for amx in (True, False)),
    ],
    indirect=True,
)
def test_latent_attention_computes_from_what_was_pushed(site: KindSite) -> None:
    state, reason = site.settled()
    assert state is EngineState.SERVING, reason
    (first, *_) = site.digests(site.vllm)
    # CPU vLLM answers one prompt in two ways: bytes are compared, not tokens.
    made = "_w_uv_packed" if site.amx else "W_UV"
    assert any(name.endswith(f".{made}") for name in first)
    assert site.transforms() == {Transform.TWIN if site.amx else Transform.PLAN}
    _becomes(site)


@pytest.mark.parametrize(
    "site",
    [
        *(_site("int8", amx=amx, battery=True) for amx in (True, False)),
        *(_site("int8", amx=amx, battery=True, tp=2) for amx in (True, False)),
    ],
    indirect=True,
)
def test_int8_is_served_where_its_packed_bytes_are_tensors(site: KindSite) -> None:
    state, reason = site.settled()
    if not site.amx:
        assert state is EngineState.FENCED
        assert "memory that cannot be copied" in reason
        assert "handler_tensor" in reason
        return
    assert state is EngineState.SERVING, reason
    _becomes(site)


@pytest.mark.parametrize(
    "site",
    [
        _site("gptq"),
        _site("gptq", battery=True, tp=2),
        _site("gptq", battery=True, dp=2),
        _site("awq", battery=True),
    ],
    indirect=True,
)
def test_int4_is_repacked_beside_generation(site: KindSite) -> None:
    state, reason = site.settled()
    assert state is EngineState.SERVING, reason
    assert site.transforms() == {Transform.TWIN}
    _becomes(site)


@pytest.mark.parametrize("site", [_site("packed")], indirect=True)
@pytest.mark.battery
def test_what_lies_behind_handles_is_refused_with_what_prevents_it(site: KindSite) -> None:
    state, reason = site.settled()
    assert state is EngineState.FENCED
    assert "memory that cannot be copied" in reason
    assert "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1" in reason
    assert not site.vllm.answers()


@pytest.mark.skipif(not HAS_FP8_CACHE, reason=LACKS_FP8_CACHE)
@pytest.mark.parametrize("site", [_site("scales")], indirect=True)
def test_scales_of_the_cache_are_those_of_the_version(site: KindSite) -> None:
    state, reason = site.settled()
    assert state is EngineState.SERVING, reason
    # Adopted with 1.0, which is what they are without a checkpoint's.
    assert site.transforms() == {Transform.TWIN}
    prompts = ("hello world", "the quick brown fox jumps over")
    before = site.digests(site.vllm), [site.vllm.complete(prompt) for prompt in prompts]
    with Client(site.server.address) as trainer:
        version = trainer.push(site.folders["b"]).version
        # What is cached was written with the scales before.
        with pytest.raises(WeightSyncError, match=r"use pause\.cache RECOMPUTE") as refused:
            trainer.apply(version, cache="keep")
        assert refused.value.reason is Reason.ENGINE_UNSUPPORTED
        trainer.apply(version)
        assert trainer.verify().verified
        after = site.digests(site.vllm), [site.vllm.complete(prompt) for prompt in prompts]
        trainer.rollback(reason="test")
        assert trainer.verify().verified
    assert site.digests(site.vllm) == before[0]
    assert [site.vllm.complete(prompt) for prompt in prompts] == before[1]
    site.vllm.stop()
    assert after == site.fresh_answers("b", *prompts)
    assert [answer.tokens for answer in after[1]] != [answer.tokens for answer in before[1]]
