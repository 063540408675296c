"""What vLLM's own loading makes of weights, and which models are refused because of it.

The models are loaded as a rank loads them, and its loader, without an engine around them: by what
vLLM chooses for this processor, and where that has AMX also by what it chooses for one without.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import make_int4, make_int8, make_modelopt, make_reranker
from tests.support.processors import NO_AMX
from tests.support.vllm_server import cpu_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Pair = tuple[Path, Path]

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

DENSE = ("llama", "qwen3", "gemma2", "gemma3")


@pytest.fixture(scope="module")
def models(
    checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Pair]:
    """Return two checkpoints of each kind."""

    def pair(arch: str) -> Pair:
        tied = arch.startswith("gemma")
        first, second = (
            checkpoint(arch, dtype="bfloat16", tied=tied, seed=seed) for seed in (1, 2)
        )
        return first, second

    root = tmp_path_factory.mktemp("made")

    def made(kind: str, make: Callable[..., Path], *how: str, of: str = "qwen2") -> Pair:
        first, second = pair(of)
        return make(first, root / f"{kind}1", *how), make(second, root / f"{kind}2", *how)

    return {
        # vLLM makes the group of expert parallel ranks only for a model with experts: that first.
        **{arch: pair(arch) for arch in ("qwen3_moe", *DENSE, "deepseek_v2")},
        "int8": made("int8", make_int8),
        "modelopt": made("modelopt", make_modelopt),
        "reranker": made("reranker", make_reranker, of="qwen3"),
        **{kind: made(kind, make_int4, kind) for kind in ("gptq", "awq")},
    }


@pytest.fixture(scope="module")
def seen(models: dict[str, Pair], run_dir: Path, amx: bool) -> dict[str, Any]:
    order = {
        "models": {name: [*map(str, pair)] for name, pair in models.items()},
        "amx": amx,
        "rendezvous": str(run_dir / f"meet-{amx}"),
    }
    # A process of its own, because the plugin and vLLM's environment change it for good.
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.loaded_kinds", json.dumps(order)],
        env={**os.environ, **cpu_environment(), **({} if amx else NO_AMX)},
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


@pytest.mark.parametrize("arch", [*DENSE, "qwen3_moe"])
def test_ordinary_models_read_nothing_that_an_update_does_not_reach(
    seen: dict[str, Any], arch: str
) -> None:
    found = seen[arch]
    assert found["refusals"] == []
    assert found["plain"] == ""
    assert found["made"] > 0
    assert found["why"] == ""
    plan = found["plan"]
    assert plan["copied"] == []
    # With the switch experts are plain too.
    assert plan["unlike"] == plan["unlike_fresh"] == []
    assert plan["without_norms"]
    assert all("norm" in name for name in plan["without_norms"])


def test_matrices_made_for_latent_attention_become_those_of_the_version(
    seen: dict[str, Any], amx: bool
) -> None:
    found = seen["deepseek_v2"]
    assert found["refusals"] == [], "the proof at the start decides"
    if amx:
        # vLLM packs them and lets go of the parameter that they come from.
        assert "kv_b_proj.weight and emptied it" in found["plain"]
        assert "kv_b_proj.weight" in found["why"]
        packed = [
            n for n in found["twin"]["names"] if n.endswith(("._w_uk_packed", "._w_uv_packed"))
        ]
        assert len(packed) == 2 * 2
        assert found["twin"]["unlike"] == found["twin"]["unlike_fresh"] == []
        return
    assert (found["plain"], found["why"]) == ("", "")
    assert found["plan"]["unlike"] == found["plan"]["unlike_fresh"] == []
    # They are views of a parameter; copies would be found.
    copied = [name.rsplit(".", 1)[-1] for name in found["plan"]["copied"]]
    assert copied == ["W_UV"] * 2


def test_int8_is_loaded_again_where_its_packed_bytes_are_tensors(
    seen: dict[str, Any], amx: bool
) -> None:
    found, twin = seen["int8"], seen["int8"]["twin"]
    assert found["why"]
    if amx:
        # Also in a process that had the plugin before vLLM's kernels.
        assert (twin["refused"], twin["unlike"], twin["unlike_fresh"]) == ("", [], [])
        return
    assert "memory that cannot be copied" in twin["refused"]
    assert all(name.endswith("handler_tensor") for name in twin["names"])


@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_int4_is_loaded_again_whatever_it_is_packed_for(seen: dict[str, Any], kind: str) -> None:
    found, twin = seen[kind], seen[kind]["twin"]
    assert found["why"]
    assert (twin["refused"], twin["unlike"], twin["unlike_fresh"]) == ("", [], [])


def test_fp8_of_modelopt_is_loaded_again_with_all_its_scales(seen: dict[str, Any]) -> None:
    found, twin = seen["modelopt"], seen["modelopt"]["twin"]
    assert found["why"]
    assert (twin["refused"], twin["unlike"], twin["unlike_fresh"]) == ("", [], [])
    ends = {name.rpartition(".")[2] for name in twin["names"]}
    assert {"weight_scale", "input_scale", "_k_scale", "_v_scale", "_k_scale_cpu"} <= ends


def test_a_head_that_loading_takes_away_is_loaded_again_and_leaves_nothing(
    seen: dict[str, Any],
) -> None:
    found, twin = seen["reranker"], seen["reranker"]["twin"]
    assert "lm_head.weight" in found["why"]
    assert (twin["refused"], twin["unlike"], twin["unlike_fresh"]) == ("", [], [])
    assert "score.weight" in twin["names"]
    assert not [name for name in twin["names"] if "lm_head" in name]
