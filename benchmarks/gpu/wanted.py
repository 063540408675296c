"""What each figure is held against: a physical limit or a peer of the same run, and how near."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COLOCATED_ROWS", "MOE30_ROWS", "PART_ROWS", "ROWS", "Row", "beside"]

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One figure and what stands beside it.

    Attributes:
        figure: Its key.
        text: What the limit is, in words.
        limit: Computes it; raises KeyError where the run has not measured what it takes.
        factor: Most that the figure may be of the limit; at a rate, least. None: nothing wanted.
        least: Whether more is better.
    """

    figure: str
    text: str
    limit: Callable[[Figures], float]
    factor: float | None = None
    least: bool = False


def _over(rate: str, times: float = 1.0) -> Callable[[Figures], float]:
    """Return what computes the time that a rank's bytes take at a rate of the run."""
    return lambda f: times * f["bytes_per_rank"] / 1e9 / f[rate]


def _figure(name: str, plus: float = 0.0) -> Callable[[Figures], float]:
    return lambda f: float(f[name]) + plus


def _crossings(figures: Figures) -> float:
    return _to_host(figures) + _over("h2d_pinned_gbps")(figures)


def _to_host(figures: Figures) -> float:
    return float(figures["bytes"]) / 1e9 / float(figures["d2h_pinned_gbps"])


def _switch(figures: Figures) -> float:
    """Return what a switch may stall tokens for; prestaged where the run has staged ahead."""
    written = figures.get("commit_prestaged_s", figures["between_steps_commit_s"])
    return float(written) + float(figures["between_steps_verify_s"]) + 0.006


def _exchange(figures: Figures) -> float:
    """Return what may lie between two tokens where the new weights are exchanged for the old ones.

    A twin's swap reads and writes both sides, which is two copies; a plan's copy is one.
    """
    copies = 1 if figures["transform"] == "plan" else 2
    moved = copies * figures["live_bytes"] / 1e9 / figures["d2d_gbps"]
    read = figures["live_bytes"] / 1e9 / figures["read_gbps"]
    limit = figures["vllm_pause_floor_s"] + 1.25 * moved + 1.5 * read + 0.015
    return float(min(limit, _PAUSE_S))


def _arenas(count: int, more: float) -> Callable[[Figures], float]:
    return lambda f: count * f["arena_bytes"] + more


def _restart(figures: Figures) -> float:
    return float(figures["vllm_start_s"]) + 2 * float(figures["twin_load_s"]) + 20


def _constant(value: float) -> Callable[[Figures], float]:
    return lambda _: value


#: Whatever the limits of a run are, of a model of 31 GB.
_PAUSE_S = 0.075

_H2D = "bytes per rank / pinned host to device"
_PAGEABLE = "bytes per rank / pageable host to device"
_D2D = "bytes per rank / device to device"
_READ = "reading both copies at the read rate"
_FLOOR = "vllm_pause_floor_s + 0.025"
_PCIE = "both PCIe crossings"
_SWITCH = "commit and verify of the switch + 0.006"

ROWS = (
    Row("vllm_reload_s", _PAGEABLE, _over("h2d_pageable_gbps")),
    Row("torchforge_way_s", _PAGEABLE, _over("h2d_pageable_gbps")),
    Row("vllm_ipc_s", _D2D, _over("d2d_gbps")),
    Row("vllm_nccl_s", "bytes / copy between the GPUs", lambda f: f["bytes"] / 1e9 / f["p2p_gbps"]),
    Row(
        "vllm_nccl_unpacked_s",
        "bytes / copy between the GPUs",
        lambda f: f["bytes"] / 1e9 / f["p2p_gbps"],
    ),
    Row("vllm_pause_floor_s", "token_gap_p50_s", _figure("token_gap_p50_s")),
    Row("vllm_pause_generation_s", "vllm_pause_floor_s", _figure("vllm_pause_floor_s")),
    Row("commit_s", _H2D, _over("h2d_pinned_gbps")),
    Row("commit_s_exact", _H2D, _over("h2d_pinned_gbps")),
    Row("commit_registered_s", _H2D, _over("h2d_pinned_gbps"), 1.15),
    Row("commit_prestaged_s", _D2D, _over("d2d_gbps"), 1.25),
    Row(
        "commit_delta_1pct_s",
        "one fused scatter, share of the rank",
        lambda f: f["scatter_1pct_s"] * f["bytes_per_rank"] / f["bytes"],
        1.25,
    ),
    Row("verify_s", _READ, _over("read_gbps", 2), 1.5),
    Row("verify_s_exact", _READ, _over("read_gbps", 2), 1.5),
    Row("verify_delta_1pct_s", "commit_delta_1pct_s", _figure("commit_delta_1pct_s"), 2.0),
    Row("pause_total_s", _FLOOR, _figure("vllm_pause_floor_s", 0.025), 1.0),
    Row("pause_total_delta_1pct_s", _FLOOR, _figure("vllm_pause_floor_s", 0.025), 1.0),
    Row("pause_total_s_exact", "vllm_pause_clear_s", _figure("vllm_pause_clear_s")),
    Row("between_steps_stall_s", _SWITCH, _switch, 1.0),
    Row("between_steps_first_stall_s", _SWITCH, _switch, 1.0),
    Row("update_end_to_end_s", _PCIE, _crossings, 1.5),
    Row("update_end_to_end_delta_1pct_s", _PCIE, _crossings),
    Row("update_end_to_end_s_exact", _PCIE, _crossings),
    Row("push_stream_gbps", "4 GB/s", lambda _: 4.0, 1.0, least=True),
    Row("push_stream_one_gbps", "grpc_floor_gbps", _figure("grpc_floor_gbps"), least=True),
    Row("push_stream_own_gbps", "grpc_floor_gbps", _figure("grpc_floor_gbps"), 1.0, least=True),
    Row("push_cuda_gbps", "pinned device to host", _figure("d2h_pinned_gbps"), least=True),
    Row("push_same_host_gbps", "20 GB/s", lambda _: 20.0, 1.0, least=True),
    Row(
        "push_same_host_cuda_gbps",
        "pinned device to host",
        _figure("d2h_pinned_gbps"),
        0.75,
        least=True,
    ),
    Row(
        "push_sharded_cuda_gbps",
        "one process that has all of it",
        _figure("push_same_host_cuda_gbps"),
        0.9,
        least=True,
    ),
    Row(
        "h2d_bytes_per_rank",
        "bytes of the model / ranks, and a tenth more",
        lambda f: 1.1 * f["bytes"] / f["tp"],
        1.0,
    ),
    Row("verify_registered_s", _H2D, _over("h2d_pinned_gbps")),
    Row("staging_slowdown", "token gaps without it", lambda _: 1.0, 1.08),
    Row("staging_max_gap_s", "token_gap_p50_s + 0.005", _figure("token_gap_p50_s", 0.005), 1.0),
)

#: Of the part moe30.
MOE30_ROWS = (
    Row("vllm_pause_floor_s", "token_gap_p50_s", _figure("token_gap_p50_s")),
    Row(
        "pause_total_s",
        "vllm_pause_floor_s + 1.25 of the bytes moved at the copy rate + 1.5 of one read of what "
        "is live + 0.015, and 0.075",
        _exchange,
        1.0,
    ),
    Row("reload_over_pause", "100", _constant(100), 1.0, least=True),
    Row("between_stall_s", _SWITCH, _switch),
    Row("twin_load_s", "8 s", _constant(8), 1.0),
    Row("twin_slowdown", "token gaps without it", _constant(1), 1.15),
    Row("twin_max_gap_s", "token_gap_p50_s + 0.005", _figure("token_gap_p50_s", 0.005), 1.0),
    Row("device_bytes_used", "the arena + 1.5 GB", _arenas(1, 1.5e9), 1.0),
    Row("device_bytes_used_peak", "two arenas + 2 GB", _arenas(2, 2e9), 1.0),
    Row("restart_to_serving_s", "vllm_start_s + two loads + 20 s", _restart, 1.0),
    Row("push_s", "bytes, one thread's copy", lambda f: f["bytes"] / 1e9 / f["memcpy_gbps"]),
)

#: Of the part colocated, besides.
COLOCATED_ROWS = (
    *ROWS,
    Row(
        "update_end_to_end_device_s",
        "vLLM's ipc backend end to end",
        _figure("update_end_to_end_vllm_ipc_s"),
        1.0,
    ),
    Row("push_slowdown", "token gaps without it", _constant(1.0), 1.10),
    Row("device_pause_s", _FLOOR, _figure("vllm_pause_floor_s", 0.025)),
    Row("host_copy_follows_s", "bytes / pinned device to host", _to_host),
    Row("read_s", "bytes per rank / read rate", _over("read_gbps")),
    Row("in_place_commit_s", "one read of the parameters", _figure("read_s"), 1.5),
)

#: Of the parts that have their own.
PART_ROWS = {"moe30": MOE30_ROWS, "colocated": COLOCATED_ROWS}


def beside(figures: Figures, rows: Sequence[Row] = ROWS) -> dict[str, dict[str, Any]]:
    """Return, for each figure that a run has and can hold against something, what and how near.

    Args:
        figures: All that the run has.
        rows: What they are held against.
    """
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        value = figures.get(row.figure)
        if value is None:
            continue
        try:
            limit = row.limit(figures)
        except (KeyError, TypeError, ZeroDivisionError):
            continue
        if not limit:
            continue
        ratio = value / limit
        entry: dict[str, Any] = {"limit": _short(limit), "is": row.text, "ratio": _short(ratio)}
        if row.factor is not None:
            entry["wanted"] = f"{'at least' if row.least else 'at most'} {row.factor:g}"
            entry["met"] = ratio >= row.factor if row.least else ratio <= row.factor
        found[row.figure] = entry
    return found


def _short(value: float) -> float:
    return float(f"{value:.4g}")
