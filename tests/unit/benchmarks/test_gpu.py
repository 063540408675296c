"""The GPU host's benchmark where no GPU is needed: limits, pushes, checkpoints and the table."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.gpu.checkpoint import Files, write_checkpoint
from benchmarks.gpu.limits import FIGURES
from benchmarks.gpu.merge import merge, read_lines
from benchmarks.gpu.results import Results
from benchmarks.gpu.shape import FULL, SMALL
from benchmarks.gpu.trainer import Trainer
from benchmarks.gpu.wanted import beside


def _line(part: str, *flags: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.gpu", "--part", part, "--small", "--json"]
    command += ["--device", "cpu", "--rounds", "1", *flags]
    done = subprocess.run(command, capture_output=True, check=False)
    (line,) = done.stdout.decode().splitlines()
    report: dict[str, Any] = json.loads(line)
    return report


def test_the_full_shape_is_the_one_of_the_published_model() -> None:
    assert FULL.elements == 7_615_616_512
    assert len(FULL.tensors) == 339


def test_limits_come_in_one_line() -> None:
    report = _line("limits")
    assert report["errors"] == []
    missing = {name for name in FIGURES if name not in report}
    assert missing == {"h2d_registered_gbps", "p2p_gbps"}
    assert report["parameters"]["bytes"] == SMALL.nbytes


@pytest.mark.timeout(180)
@pytest.mark.battery
def test_pushes_are_held_against_the_bare_stream() -> None:
    report = _line("push")
    assert report["errors"] == []
    assert report["push_stream_gbps"] > 0
    assert report["push_stream_one_gbps"] > 0
    assert report["push_same_host_gbps"] > 0
    held = report["beside"]["push_stream_own_gbps"]
    assert held["limit"] == report["grpc_floor_gbps"]
    assert held["met"] is (report["push_stream_own_gbps"] >= report["grpc_floor_gbps"])


def test_a_part_that_cannot_run_still_prints_its_line() -> None:
    report = _line("nccl")
    assert report["errors"] == ["nccl: RuntimeError: this part needs 2 GPUs, and this host has 0"]


def test_a_checkpoint_is_one_for_everybody(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL.spec)
    (file,) = tmp_path.glob("*.safetensors")
    with safe_open(file, framework="pt") as opened, Files(tmp_path) as files:
        assert set(opened.keys()) == set(SMALL.tensors) == set(files.tensors)
        for name, shape in SMALL.tensors.items():
            theirs = opened.get_tensor(name)
            assert tuple(theirs.shape) == shape
            assert torch.equal(theirs, files.tensors[name])
        head, embedding = (
            files.tensors[n] for n in ("lm_head.weight", "model.embed_tokens.weight")
        )
        assert not torch.equal(head, embedding)


def test_the_trainer_changes_everything_or_a_little_and_writes_it(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, SMALL.spec)
    trainer = Trainer("cpu", str(tmp_path))
    assert trainer.same_as(str(tmp_path)) == {"same": True}
    seen = set()
    for _ in range(16):
        trainer.change()
        tensor = trainer.tensors["lm_head.weight"]
        assert bool(torch.isfinite(tensor).all())
        seen.add(tensor.view(torch.int16)[0, 0].item())
    assert len(seen) == 16
    before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
    changed = trainer.change_some(0.01)["changed"]
    counted = sum(int((t != before[name]).sum()) for name, t in trainer.tensors.items())
    assert changed == counted
    assert 0.009 < changed / SMALL.elements < 0.0101
    assert trainer.same_as(str(tmp_path)) == {"same": False}
    trainer.write(str(tmp_path))
    assert trainer.same_as(str(tmp_path)) == {"same": True}


def test_figures_stand_beside_their_limits() -> None:
    figures = {
        "bytes": 2e9,
        "bytes_per_rank": 1e9,
        "h2d_pinned_gbps": 50.0,
        "commit_registered_s": 0.022,
    }
    figures |= {"pause_total_s": 0.05, "vllm_pause_floor_s": 0.03, "verify_s": 1.0}
    rows = beside(figures)
    assert rows["commit_registered_s"]["limit"] == 0.02
    assert rows["commit_registered_s"]["ratio"] == 1.1
    assert rows["commit_registered_s"]["met"] is True
    assert rows["pause_total_s"]["limit"] == 0.055
    assert rows["pause_total_s"]["met"] is True
    # Its limit was not measured.
    assert "verify_s" not in rows
    assert beside(figures | {"pause_total_s": 0.06})["pause_total_s"]["met"] is False


def test_a_failed_figure_leaves_the_others() -> None:
    out = io.StringIO()
    results = Results("pause", 60.0, out)
    with results.attempt("one"):
        results.add(vllm_pause_floor_s=0.01)
    with results.attempt("two"):
        float("broken")
    assert list(Results("late", -1.0, out).rounds(5, "what")) == []
    results.emit(as_json=True)
    results.emit(as_json=True)
    line = json.loads(out.getvalue())
    assert line["vllm_pause_floor_s"] == 0.01
    assert line["errors"] == ["two: ValueError: could not convert string to float: 'broken'"]


def test_lines_of_parts_become_one_table() -> None:
    limits = {
        "benchmark": "gpu", "parameters": {"part": "limits", "gpu": "H200"}, "d2d_gbps": 2000.0,
        "beside": {}, "errors": [], "spread": {"d2d_gbps": {"min": 1, "max": 2, "rounds": 5}},
        "machine": {"cores": 16},
    }  # fmt: skip
    push = {
        "benchmark": "gpu", "parameters": {"part": "push"}, "push_cuda_gbps": 2.0, "d2d_gbps": 1.0,
        "beside": {"push_cuda_gbps": {"limit": 50.0, "is": "pinned", "ratio": 0.04,
                                      "wanted": "at least 0.75", "met": False}},
        "errors": ["bare: no"], "bitwise_equal": True,
    }  # fmt: skip
    older = limits | {"d2d_gbps": 1.0}
    text = f"INFO hello\n{json.dumps(older)}\n{{}}\n"
    results = read_lines([text, f"{json.dumps(limits)}\n{json.dumps(push)}\n"])
    table = merge(results).splitlines()
    assert table[2] == "| limits | `d2d_gbps` | 2000.0 | 1 .. 2 (5) |  |  |  |"
    assert table[3] == (
        "| push | `push_cuda_gbps` | 2.0 |  | 50.0 (pinned) | 0.04 | at least 0.75, **missed** |"
    )
    assert table[4] == "| push | `bitwise_equal` | true |  |  |  |  |"
    assert "- push failed: bare: no" in table
    assert "- limits: gpu H200, cores 16" in table
