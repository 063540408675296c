"""Mixtures of experts as vLLM loads them: what the load plan makes of every form that it takes.

Models are loaded by vLLM as a rank loads them, without an engine: alone, as half of the columns
of each expert, and as half of the experts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.support.models import quantise_checkpoint
from tests.support.processors import NO_AMX
from tests.support.vllm_server import cpu_environment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]


def _run(
    orders: list[dict[str, Any]], program: str = "tests.support.expert_plans", **variables: str
) -> list[dict[str, Any]]:
    """Run one program per rank; return what each has seen."""
    environment = {**os.environ, **cpu_environment(), **variables}
    running = [
        subprocess.Popen(
            [sys.executable, "-m", program, json.dumps(order)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in orders
    ]
    found = []
    try:
        for process in running:
            out, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors[-6000:]
            found.append(json.loads(out.strip().splitlines()[-1]))
    finally:
        for process in running:
            process.kill()
            process.wait()
    return found


@pytest.fixture(
    scope="module",
    params=[*(pytest.param(one, marks=pytest.mark.battery) for one in ("alone", "tp")), "ep"],
)
def seen(
    request: pytest.FixtureRequest, checkpoint: Callable[..., Path], run_dir: Path
) -> list[dict[str, Any]]:
    first, second = (checkpoint("qwen3_moe", dtype="bfloat16", seed=seed) for seed in (1, 2))
    ranks = 1 if request.param == "alone" else 2
    order = {
        "first": str(first),
        "second": str(second),
        "rendezvous": str(run_dir / f"meet-{request.param}"),
        "ranks": ranks,
        "flags": {"enable_expert_parallel": True} if request.param == "ep" else {},
    }
    return _run([{**order, "rank": rank} for rank in range(ranks)])


@pytest.mark.parametrize("form", ["each", "fused"])
def test_experts_are_loaded_as_vllm_loads_them(seen: list[dict[str, Any]], form: str) -> None:
    for found in seen:
        assert found[form]["unlike"] == []
        assert found[form]["unlike_fresh"] == []


def test_parts_of_a_layout_are_taken_or_named(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["parts"]["fused"] == []
        assert found["parts"]["other"] == ["model.layers.0.mlp.experts.w1_and_w3.weight"]


@pytest.mark.parametrize("form", ["each", "fused"])
def test_exchanged_halves_are_written_where_they_are_live(
    seen: list[dict[str, Any]], form: str
) -> None:
    for found in seen:
        exchanged = found["exchanged"]
        assert exchanged["before"] == exchanged["params"]
        assert len(exchanged["params"]) == 2
        assert exchanged[form]["unlike"] == []
        assert exchanged[form]["unlike_fresh"] == []


def test_what_is_done_to_experts_besides_is_named(seen: list[dict[str, Any]]) -> None:
    for found in seen:
        assert found["exchanged"]["torn"] == found["exchanged"]["params"][:1]


def test_ranks_share_the_experts(seen: list[dict[str, Any]]) -> None:
    whole = sum(found["bytes"] for found in seen)
    assert {found["bytes"] * len(seen) for found in seen} == {whole}


@pytest.fixture(scope="module")
def packed_and_plain(
    checkpoint: Callable[..., Path], run_dir: Path, amx: bool
) -> list[dict[str, Any]]:
    model = checkpoint("qwen3_moe", dtype="bfloat16", seed=1)
    found = []
    for switch in ("linear", "1"):
        place = str(run_dir / f"meet-{switch}-{amx}")
        order = {"first": str(model), "rendezvous": place, "flags": {}, "amx": amx}
        variables = {"WEIGHTSYNC_CPU_PLAIN_WEIGHTS": switch, **({} if amx else NO_AMX)}
        found += _run([{**order, "ranks": 1, "rank": 0}], **variables)
    return found


def test_packed_experts_are_refused_with_the_switch_named(
    packed_and_plain: list[dict[str, Any]], amx: bool
) -> None:
    packed, plain = packed_and_plain
    assert (packed["isa"] == "amx") is amx
    assert packed["plain"] == (
        "vLLM has repacked the experts of model.layers.0.mlp.experts.routed_experts; restart vLLM "
        "with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1"
    )
    assert plain["plain"] == ""


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_plain_experts_compute_what_packed_ones_do(
    packed_and_plain: list[dict[str, Any]], activation: str
) -> None:
    packed, plain = (found["computed"][activation] for found in packed_and_plain)
    largest = max(map(abs, packed))
    assert largest > 0.1
    # Rounded to bfloat16 once more on the way.
    assert plain == pytest.approx(packed, abs=0.02 * largest)


def test_experts_of_another_rank_add_nothing(packed_and_plain: list[dict[str, Any]]) -> None:
    _, plain = packed_and_plain
    assert plain["computed"]["mapped"] == plain["computed"]["without"]
    assert plain["computed"]["mapped"] != plain["computed"]["silu"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("experts", ["TRITON", "FLASHINFER_CUTLASS"])
def test_block_fp8_is_copied_with_its_scales(
    experts: str, ranks: int, checkpoint: Callable[..., Path], run_dir: Path
) -> None:
    made = [
        checkpoint("qwen3_moe", dtype="bfloat16", seed=seed, hidden=512, layers=1)
        for seed in (1, 2)
    ]
    place = run_dir / f"fp8-{experts}-{ranks}"
    first, second = (quantise_checkpoint(model, place / model.name) for model in made)
    order = {
        "first": str(first),
        "second": str(second),
        "bfloat16": str(made[0]),
        "experts": experts,
        "rendezvous": str(place / "meet"),
        "ranks": ranks,
    }
    orders = [{**order, "rank": rank} for rank in range(ranks)]
    for found in _run(orders, program="tests.support.fp8_plans"):
        assert found["each"] == {"unlike": [], "unlike_fresh": []}
        assert found["dtypes"] == ["BF16", "F32", "F8_E4M3"]
        exchanged = [name.rpartition(".")[2] for name in found["params"]]
        halves = ["w13_weight", "w13_weight_scale_inv"]
        assert exchanged == (halves if experts == "FLASHINFER_CUTLASS" else [])
        # Nothing is quantised on the way: who pushes does that.
        assert found["refused"]
        assert all(name.endswith("_proj.weight") for name in found["refused"])
