"""Draw the plots of docs/explain/performance.md from docs/proof.json: `make plots`.

A test compares what is committed with what this would write, byte by byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

__all__ = ["plots"]

ROOT = Path(__file__).resolve().parent.parent
_FOLDER = ROOT / "docs" / "explain" / "plots"
_WIDTH, _LEFT, _BAR, _STEP = 720, 300, 300, 26
#: Readable on a light and on a dark page, whatever that page does with the colour behind it.
_STYLE = """\
text{font:14px system-ui,sans-serif;fill:#1f2328}.head{font-weight:600}.dim{fill:#59636e}
.back{fill:#fff}.ours{fill:#0969da}.peer{fill:#9a6700}.limit{fill:#818b98}
@media(prefers-color-scheme:dark){text{fill:#e6edf3}.dim{fill:#9198a1}
.back{fill:#0d1117}.ours{fill:#4493f8}.peer{fill:#d29922}.limit{fill:#656c76}}"""


class Bar(NamedTuple):
    """One bar. `kind` is `ours`, `peer` for another way, or `limit`."""

    kind: str
    label: str
    value: float


class Panel(NamedTuple):
    """Bars that share a scale, which begins at zero. `unit` follows each value."""

    heading: str
    unit: str
    bars: list[Bar]


def plots() -> dict[Path, str]:
    """Return the text of each plot."""
    proofs = json.loads((ROOT / "docs" / "proof.json").read_text())
    drawn = (_updates(proofs), _pauses(proofs), _pushes(proofs), _deltas(proofs), _fleet(proofs))
    return {_FOLDER / f"{name}.svg": text for name, text in drawn}


def _updates(proofs: Any) -> tuple[str, str]:
    run = _line(proofs, "gpu-colocated")
    whole = [
        Bar("ours", "WeightSync, push and apply", run["update_end_to_end_pushed_s"]),
        Bar("ours", "WeightSync, Attached.update", run["update_end_to_end_device_s"]),
        Bar("peer", "vLLM's ipc backend", run["update_end_to_end_vllm_ipc_s"]),
    ]
    pause = [
        Bar("ours", "WeightSync, push and apply", 1e3 * run["pause_total_s"]),
        Bar("ours", "WeightSync, Attached.update", 1e3 * run["device_pause_s"]),
        Bar("peer", "vLLM's ipc backend", 1e3 * run["pause_vllm_ipc_s"]),
        Bar("limit", "vLLM's pause and resume alone", 1e3 * run["vllm_pause_floor_s"]),
    ]
    panels = [
        Panel("From the trainer's call to the first new token", "s", whole),
        Panel("Of it, the pause", "ms", pause),
    ]
    title = "An update of 15.2 GB, trainer and vLLM on one H200"
    return "updates", _svg(title, panels, _source(proofs, "gpu-colocated"))


def _pauses(proofs: Any) -> tuple[str, str]:
    dense, moe, cpu = (_line(proofs, name) for name in ("gpu-apply", "gpu-moe30", "bench-apply"))
    panels = [
        Panel(
            "Qwen2, 7.6 billion parameters, bfloat16, one H200",
            "ms",
            [
                Bar("ours", "every value changed", 1e3 * dense["pause_total_s"]),
                Bar("ours", "1 % of the values changed", 1e3 * dense["pause_total_delta_1pct_s"]),
                Bar("ours", "between steps", 1e3 * dense["between_steps_stall_s"]),
                Bar("limit", "vLLM's pause and resume alone", 1e3 * dense["vllm_pause_floor_s"]),
            ],
        ),
        Panel(
            "Qwen3-30B-A3B's shape, block fp8, one H200",
            "s",
            [
                Bar("ours", "every value changed", moe["pause_total_s"]),
                Bar("peer", "vLLM's reload_weights", moe["vllm_reload_s"]),
            ],
        ),
        Panel(
            "Qwen2, 494 million parameters, float32, two CPU cores",
            "s",
            [
                Bar("ours", "every value changed", cpu["pause_s"]),
                Bar("ours", "1 % of the values changed", cpu["delta_pause_s"]),
                Bar("ours", "rollback", cpu["rollback_pause_s"]),
                Bar("peer", "vLLM's reload_weights", cpu["reload_pause_s"]),
            ],
        ),
    ]
    title = "How long generation is paused by an apply"
    return "pauses", _svg(title, panels, _source(proofs, "gpu-apply", "gpu-moe30", "bench-apply"))


def _pushes(proofs: Any) -> tuple[str, str]:
    run, gpu = _line(proofs, "bench-push"), _line(proofs, "gpu-colocated")
    on_gpu = gpu["parameters"]["bytes"] / gpu["push_s"] / 1e9
    panels = [
        Panel(
            "On the server's host",
            "GB/s",
            [
                Bar("ours", "host memory, 1 GiB, two CPU cores", run["same_host_gbps"]),
                Bar("limit", "one thread copies the tensors", run["tensor_copy_gbps"]),
                Bar("ours", "a GPU's memory, 15.2 GB, H200", on_gpu),
                Bar("limit", "the bus, device to host", gpu["d2h_pinned_gbps"]),
            ],
        ),
        Panel(
            "Over gRPC, one stream, 1 GiB, two CPU cores",
            "GB/s",
            [
                Bar("ours", "TCP", run["stream_gbps"]),
                Bar("peer", "a bare gRPC stream, TCP", run["grpc_floor_gbps"]),
                Bar("ours", "unix socket", run["stream_gbps_unix"]),
                Bar("peer", "a bare gRPC stream, unix socket", run["grpc_floor_gbps_unix"]),
            ],
        ),
        Panel(
            "To a store on disk, 1 GiB, two CPU cores",
            "GB/s",
            [
                Bar("ours", "committed and durable", run["durable_gbps"]),
                Bar("peer", "one thread writes and flushes", run["disk_gbps"]),
            ],
        ),
    ]
    title = "How fast a push is"
    return "pushes", _svg(title, panels, _source(proofs, "bench-push", "gpu-colocated"))


def _deltas(proofs: Any) -> tuple[str, str]:
    run, train = _line(proofs, "bench-delta"), _line(proofs, "bench-train")
    row = next(row for row in run["rows"] if row["density"] == 0.01)
    sent = [
        Bar("ours", f"a delta, learning rate {rate}", train[f"wire_bytes_{rate}"] / 1e6)
        for rate in train["parameters"]["rates"]
    ]
    dense = train["wire_bytes_1e-6"] * train["ratio_to_dense_1e-6"] / 1e6
    panels = [
        Panel(
            "Bytes for each changed value, bfloat16, 1 % changed",
            "bytes",
            [
                Bar("ours", "WeightSync's delta", row["bytes_per_change"]),
                Bar("limit", "entropy of places and differences", row["entropy_floor"]),
                Bar("peer", "XOR with zstd", row["xor_bytes_per_change"]),
                Bar("peer", "pairs of index and value", row["pairs_bytes_per_change"]),
            ],
        ),
        Panel(
            "Bytes of one push in training, 9.6 million parameters",
            "MB",
            [*sent, Bar("peer", "a push in full", dense)],
        ),
    ]
    title = "What a delta sends"
    return "deltas", _svg(title, panels, _source(proofs, "bench-delta", "bench-train"))


def _fleet(proofs: Any) -> tuple[str, str]:
    run = _line(proofs, "bench-fleet")
    bars = [
        Bar("peer", "pushes to each host in turn", run["one_by_one_s"]),
        Bar("ours", "followers of an S3 store", run["push_to_staged_everywhere_s_s3"]),
        Bar("ours", "followers of the origin's memory", run["push_to_staged_everywhere_s_grpc"]),
        Bar("limit", "up once, down once", 2 * run["link_s"]),
    ]
    panels = [Panel("From the push to staged on all hosts", "s", bars)]
    title = "A version of 128 MiB on eight hosts, links of 40 MB/s"
    return "fleet", _svg(title, panels, _source(proofs, "bench-fleet"))


def _line(proofs: Any, name: str) -> Any:
    return json.loads(proofs[name]["line"])


def _source(proofs: Any, *names: str) -> str:
    runs = dict.fromkeys(f"{proofs[name]['commit'][:7]} ({proofs[name]['date']})" for name in names)
    return f"{', '.join(names)} in docs/proof.json, at {', '.join(runs)}"


def _svg(title: str, panels: Iterable[Panel], source: str) -> str:
    drawn, said, y = [], [], 34
    for panel in panels:
        y += 28
        drawn.append(f'<text class="head" x="16" y="{y}">{escape(panel.heading)}</text>')
        most = max(bar.value for bar in panel.bars)
        for bar in panel.bars:
            y += _STEP
            thick, width = 'height="17" rx="2"', max(1.0, _BAR * bar.value / most)
            value = f"{bar.value:.3g} {panel.unit}"
            drawn += [
                f'<text x="{_LEFT - 10}" y="{y}" text-anchor="end">{escape(bar.label)}</text>',
                f'<rect class="{bar.kind}" x="{_LEFT}" y="{y - 13}" {thick} width="{width:.1f}"/>',
                f'<text x="{_LEFT + width + 8:.1f}" y="{y}">{value}</text>',
            ]
        told = "; ".join(f"{bar.label}: {bar.value:.3g} {panel.unit}" for bar in panel.bars)
        said.append(f"{panel.heading}. {told}.")
    y += 34
    key, x = [], 16
    for kind, label in (("ours", "WeightSync"), ("peer", "another way"), ("limit", "limit")):
        key.append(f'<rect class="{kind}" x="{x}" y="{y - 11}" width="12" height="12" rx="2"/>')
        key.append(f'<text class="dim" x="{x + 18}" y="{y}">{label}</text>')
        x += 40 + 8 * len(label)
    key.append(f'<text class="dim" x="{x}" y="{y}">each group has its own scale from zero</text>')
    height = y + 34
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}"',
            f' width="{_WIDTH}" height="{height}" role="img" aria-labelledby="title desc">',
            f'<title id="title">{escape(title)}</title>',
            f'<desc id="desc">{escape(" ".join(said))}</desc>',
            f"<style>{_STYLE}</style>",
            f'<rect class="back" width="{_WIDTH}" height="{height}" rx="8"/>',
            f'<text class="head" x="16" y="30">{escape(title)}</text>',
            *drawn,
            *key,
            f'<text class="dim" x="16" y="{y + 22}" style="font-size:10px">{escape(source)}</text>',
            "</svg>\n",
        ]
    )


def _main() -> None:
    _FOLDER.mkdir(exist_ok=True)
    for path, text in plots().items():
        path.write_text(text)


if __name__ == "__main__":
    _main()
