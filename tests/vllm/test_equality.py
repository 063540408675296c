"""After an apply, a running vLLM answers exactly as one that was started from the new checkpoint.

Tokens and log probabilities are compared, over families, dtypes, tied heads and tensor parallelism,
with CPU repacking off: after applies that write everything, after patches, after the way back,
after switches between two steps, and after pushes of a trainer whose tensors are wider.
With repacking on, prepare refuses.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.models import nudge_checkpoint
from tests.support.scraped import scraped
from tests.support.vllm_fixtures import running_bench
from tests.support.vllm_server import VllmServer, own_core
from tests.support.weightsync_server import WeightSyncServer
from weightsync_client import Client, PushKind

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from tests.support.completion import Completion
    from tests.support.staging import BridgeClient, Version
    from tests.support.vllm_fixtures import Bench

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

PROMPTS = ("The quick brown", "Weights move from the trainer", "One two three four five")


@dataclass(frozen=True)
class Cell:
    """One combination of what changes how weights are laid out."""

    arch: str
    dtype: str
    tp: int
    tied: bool
    expert_parallel: bool = False

    def __str__(self) -> str:
        ranks = f"tp{self.tp}{'-ep' if self.expert_parallel else ''}"
        return f"{self.arch}-{self.dtype}-{ranks}-{'tied' if self.tied else 'untied'}"

    @property
    def flags(self) -> tuple[str, ...]:
        return ("--enable-expert-parallel",) if self.expert_parallel else ()

    @property
    def options(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "tied": self.tied}


#: The one that has the most of what the others have: two ranks, bfloat16, half of the experts each.
PAIRWISE = (Cell("qwen3_moe", "bfloat16", 2, tied=False, expert_parallel=True),)
EXPERTS = (
    Cell("qwen3_moe", "bfloat16", 1, tied=False),
    Cell("qwen3_moe", "float32", 2, tied=False),
)
#: vLLM's Gemma models are always tied.
ALL = tuple(
    Cell(arch, dtype, tp, tied=tied)
    for arch, dtype, tp, tied in product(
        ("llama", "qwen2", "qwen3", "gemma2", "gemma3"),
        ("float32", "bfloat16"),
        (1, 2),
        (False, True),
    )
    if tied or not arch.startswith("gemma")
)


def _answers(vllm: VllmServer) -> list[Completion]:
    return [vllm.complete(prompt, tokens=24) for prompt in PROMPTS]


@contextmanager
def _fresh(
    cell: Cell, model: Path, run_dir: Path, *, plain: bool = True
) -> Iterator[Callable[[], list[Completion]]]:
    """Start an engine without us; the result waits for it and asks it."""
    place = run_dir / f"fresh-{cell}"
    # Both engines of a cell run at the same time.
    variables = {"VLLM_CPU_OMP_THREADS_BIND": own_core(1)} if cell.tp == 1 else {}
    vllm = VllmServer(
        model,
        place,
        tp=cell.tp,
        dtype=cell.dtype,
        plain=plain,
        bridge=False,
        flags=cell.flags,
        variables=variables,
    )
    try:
        vllm.launch()
        if cell.tp == 1:
            yield lambda: _answers(vllm.ready())
        else:
            # Beside a second engine, so many workers would starve each other of two cores.
            found = _answers(vllm.ready())
            vllm.stop()
            yield lambda: found
    finally:
        vllm.stop()


def _why_no_plan(client: BridgeClient, version: Version) -> str:
    """Return why the versions of an engine must be loaded, as its ranks tell it."""
    replies = client.capture(version)
    assert all(reply["ok"] and reply["transform"] == "twin" for reply in replies), replies
    return f"{replies[0]['why']}; {replies[0]['remedy']}"


def _patch(bench: Bench, version: Version, number: int, base: str) -> str:
    """Apply a version over one that differs in little; return its apply id."""
    apply_id, reports = bench.client.prepare(version, base=base)
    whole = sum(len(segment.view) for segment in version.segments)
    for report in reports:
        assert report["patched"], report
        assert 0 < report["bytes"] < whole / 10
    for reply in bench.client.apply(version, number, apply_id=apply_id):
        assert reply["patched"]
    return apply_id


def _masters(folder: Path) -> dict[str, torch.Tensor]:
    """Return what a trainer holds of a checkpoint: wider, and more than the cast keeps."""
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    masters = {}
    for name, tensor in tensors.items():
        half = tensor.dtype is torch.bfloat16
        masters[name] = tensor.to(torch.float32 if half else torch.float64)
        # By less than half of what the narrow dtype tells apart: rounded, not cut off.
        masters[name] *= 1 - 2 ** (-12 if half else -30)
        assert torch.equal(masters[name].to(tensor.dtype), tensor)
        assert not torch.equal(masters[name], tensor.to(masters[name].dtype))
    return masters


def _check_masters(
    bench: Bench, near: Path, wanted: Path, after: tuple[list[Completion], list[Completion]]
) -> None:
    """Push masters of two checkpoints to a real server beside the engine, in full and as a delta.

    Args:
        bench: The engine, which the server takes over.
        near: The first checkpoint.
        wanted: The second.
        after: What the engine answers with each.
    """
    # Of this process: the server listens there.
    bench.staging.server.close()
    server = WeightSyncServer(bench.vllm.run_dir, bench.vllm.run_dir / "state")
    try:
        server.start()
        server.wait_serving()
        counted = 0
        with Client(server.address) as client:
            for folder, kind, answers in zip(
                (near, wanted), (PushKind.FULL, PushKind.DELTA), after, strict=True
            ):
                masters = _masters(folder)
                pushed = client.push(masters)
                assert (pushed.kind, pushed.cast) == (kind, len(masters))
                counted += len(masters)
                assert scraped(server.log, "weightsync_cast_tensors_total") == counted
                client.apply()
                assert _answers(bench.vllm) == answers
                assert client.verify().content_digest == pushed.content_digest
    finally:
        server.stop()
    assert "Traceback" not in server.log, server.log


def _check(cell: Cell, checkpoint: Callable[..., Path], run_dir: Path) -> None:
    first, second = (checkpoint(cell.arch, seed=seed, **cell.options) for seed in (1, 2))
    near = nudge_checkpoint(second, run_dir / f"near-{cell}")
    place = run_dir / str(cell)
    with (
        _fresh(cell, second, run_dir) as fresh_answers,
        running_bench(first, place, tp=cell.tp, dtype=cell.dtype, flags=cell.flags) as bench,
    ):
        expected = fresh_answers()
        a, b, c = (bench.staging.stage(folder) for folder in (first, second, near))
        adopted = bench.client.adopt(a)
        before = _answers(bench.vllm)
        copied, _ = bench.client.prepare(c)
        replies = bench.client.apply(c, 2, apply_id=copied)
        assert [(reply["rank"], reply["patched"]) for reply in replies] == [
            (rank, False) for rank in bench.client.ranks
        ]
        assert len(replies) == cell.tp
        beside = _answers(bench.vllm)
        patched = _patch(bench, b, 3, copied)
        after = _answers(bench.vllm)
        checked = bench.client.job("verify", patched, None, gives_way=True)
        assert [report["proved"] for report in checked] == [True] * cell.tp
        _patch(bench, c, 4, patched)
        assert _answers(bench.vllm) == beside
        bench.client.apply(a, 5, apply_id=adopted)
        assert _answers(bench.vllm) == before
        # No prompt fills a block of the cache, which is kept.
        switched = bench.client.switch(b, 6, patched, a, adopted)
        assert (switched.serves, len(switched.replies_json)) == (b.content_digest, cell.tp)
        without = _answers(bench.vllm)
        assert bench.client.switch(a, 7, adopted, b, patched).serves == a.content_digest
        assert _answers(bench.vllm) == before
        _check_masters(bench, near, second, (beside, expected))
    assert without == after
    assert len({str(answers) for answers in (before, beside, after)}) == 3
    assert after == expected


@pytest.mark.parametrize("cell", PAIRWISE, ids=str)
def test_equal_to_a_fresh_engine(
    cell: Cell, checkpoint: Callable[..., Path], run_dir: Path
) -> None:
    _check(cell, checkpoint, run_dir)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(cell, marks=pytest.mark.battery)
        for cell in (*ALL, *EXPERTS)
        if cell not in PAIRWISE
    ],
    ids=str,
)
def test_equal_to_a_fresh_engine_in_all_cells(
    cell: Cell, checkpoint: Callable[..., Path], run_dir: Path
) -> None:
    _check(cell, checkpoint, run_dir)


@pytest.mark.parametrize(
    "cell",
    [
        # The tied head keeps its parameter and is computed from a repacked copy all the same.
        Cell("qwen2", "float32", 1, tied=True),
        pytest.param(Cell("llama", "float32", 2, tied=False), marks=pytest.mark.battery),
    ],
    ids=str,
)
@pytest.mark.battery
def test_repacked_engine_has_no_plan(
    cell: Cell, checkpoint: Callable[..., Path], run_dir: Path
) -> None:
    model = checkpoint(cell.arch, seed=1, **cell.options)
    place = run_dir / f"packed-{cell}"
    with running_bench(model, place, tp=cell.tp, dtype=cell.dtype, plain=False) as bench:
        assert [reply["plain"] for reply in bench.client.call("hello")] == [False] * cell.tp
        why = _why_no_plan(bench.client, bench.staging.stage(model))
        assert "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1" in why


@pytest.mark.parametrize(
    "arch",
    [
        "qwen2",
        pytest.param("gemma2", marks=pytest.mark.battery),
    ],
)
@pytest.mark.battery
def test_bfloat16_without_the_switch_is_exact_or_has_no_plan(
    arch: str, checkpoint: Callable[..., Path], run_dir: Path
) -> None:
    # Whether vLLM repacks bfloat16 depends on the processor.
    cell = Cell(arch, "bfloat16", 1, tied=True)
    first, second = (checkpoint(arch, seed=seed, **cell.options) for seed in (1, 2))
    place = run_dir / f"either-{cell}"
    with (
        _fresh(cell, second, run_dir, plain=False) as fresh_answers,
        running_bench(first, place, dtype=cell.dtype, plain=False) as bench,
    ):
        a, b = bench.staging.stage(first), bench.staging.stage(second)
        if not bench.client.call("hello")[0]["plain"]:
            assert "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1" in _why_no_plan(bench.client, a)
            return
        bench.client.adopt(a)
        bench.client.apply(b, 2)
        after = _answers(bench.vllm)
        assert after == fresh_answers()
