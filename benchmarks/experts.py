"""What tens of thousands of small tensors cost one rank on the host, apart from their bytes.

    python -m benchmarks.experts [LAYERS [EXPERTS]]

A mixture of experts with block scales, each projection of each expert a tensor of its own of a few
kilobytes. Qwen3-30B-A3B has 37 000 of them; loaders cut as vLLM's do. Prints seconds as JSON.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save

from tests.support.staging import Staging
from weightsync.shm.status_page import PageReader
from weightsync.vllm.apply.host_ops import HostOps
from weightsync.vllm.worker.rank import Rank

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tests.support.staging import Version

ROWS, COLUMNS = 16, 128
_PROJECTIONS = {"gate": ("w13", 0), "up": ("w13", 1), "down": ("w2", None)}


class Experts(torch.nn.Module):
    """Layers of experts, loaded tensor by tensor."""

    def __init__(self, layers: int, experts: int) -> None:
        super().__init__()
        for layer in range(layers):
            module = torch.nn.Module()
            for kind, dtype, size in (("", torch.bfloat16, COLUMNS), ("_scale", torch.float32, 2)):
                for name, rows in (("w13", 2 * ROWS), ("w2", ROWS)):
                    data = torch.zeros(experts, rows, size, dtype=dtype)
                    setattr(module, name + kind, torch.nn.Parameter(data, requires_grad=False))
            self.add_module(str(layer), module)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Load each tensor into its half of its expert."""
        for name, tensor in weights:
            layer, expert, projection, *scale = name.split(".")
            param, half = _PROJECTIONS[projection]
            place = getattr(getattr(self, layer), f"{param}{'_scale' if scale else ''}").data
            place = place[int(expert)]
            if half is not None:
                size = place.shape[0] // 2
                place = place.narrow(0, half * size, size)
            place.copy_(tensor)


def checkpoint(layers: int, experts: int, seed: int) -> dict[str, torch.Tensor]:
    """Return a checkpoint of random values."""
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for layer in range(layers):
        for expert in range(experts):
            for projection in _PROJECTIONS:
                name = f"{layer}.{expert}.{projection}"
                made[name] = torch.randn(ROWS, COLUMNS, generator=generator).bfloat16()
                made[f"{name}.scale"] = torch.rand(ROWS, 2, generator=generator)
    return made


def nudged(tensors: dict[str, torch.Tensor], every: int = 50) -> dict[str, torch.Tensor]:
    """Return the same with one value in so many changed, in every tensor."""
    made = {name: tensor.clone() for name, tensor in tensors.items()}
    for tensor in made.values():
        tensor.view(-1)[::every] += 1
    return made


class Measured:
    """A rank, and how long it takes for what."""

    def __init__(self, model: Experts, staging: Staging) -> None:
        self.seconds: dict[str, float] = {}
        self._staging = staging
        device = torch.device("cpu")
        self._rank = Rank(model, device, "0/0/0", staging.socket, HostOps(device, 1))

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.seconds[what] = round(time.perf_counter() - begin, 4)

    def prepare(self, what: str, apply_id: str, version: Version, **more: Any) -> dict[str, Any]:
        """Prepare a version; return the report."""
        name, (page,) = self._staging.pages(["0/0/0"])
        args = {"apply_id": apply_id, "page": name, "document": version.document.id, **more}
        with self._timed(what):
            self._rank.prepare({"socket": self._staging.socket, **args})
            return _ended(page)

    def adopt(self, version: Version) -> None:
        """Capture the plan of a checkpoint and prove it."""
        self.prepare("first_look", "base", version)
        with self._timed("capture"):
            self.slices = self._rank.capture({"document": version.document.id})["slices"]
        assert self.prepare("adopt", "base", version, compare_live=True)["proved"]

    def commit(self, what: str, apply_id: str) -> None:
        """Write a version and prove it, as in a pause."""
        with self._timed(f"{what}_pause"):
            reply = self._rank.commit({"apply_id": apply_id})
        assert not reply["mismatched"], reply
        self.seconds[f"{what}_write"] = round(reply["commit_s"], 4)
        self.seconds[f"{what}_verify"] = round(reply["verify_s"], 4)


def _ended(page: PageReader) -> dict[str, Any]:
    while True:
        report = page.read()
        if report is not None and report["phase"] != "running":
            assert report["phase"] in ("ready", "needs_capture"), report
            return report
        time.sleep(0.0005)


def main(layers: int = 48, experts: int = 128) -> dict[str, Any]:
    """Return what was measured."""
    torch.set_num_threads(1)
    first, second = (checkpoint(layers, experts, seed) for seed in (1, 2))
    model = Experts(layers, experts)
    model.load_weights(first.items())
    with tempfile.TemporaryDirectory() as folder:
        staging = Staging(Path(folder) / "s.sock")
        try:
            a, b, c = (staging.stage_files([save(t)]) for t in (first, second, nudged(second)))
            measured = Measured(model, staging)
            measured.adopt(a)
            for turn in ("full_first", "full"):
                measured.prepare(f"{turn}_prepare", "b", b)
                measured.commit(turn, "b")
            for turn in ("patch_first", "patch"):
                report = measured.prepare(f"{turn}_prepare", "c", c, base="b")
                assert report["patched"], report
                measured.commit(turn, "c")
                measured.commit("back", "b")
            tensors = SimpleNamespace(count=len(first), bytes=sum(t.nbytes for t in first.values()))
            return {**vars(tensors), "slices": measured.slices, **measured.seconds}
        finally:
            staging.close()


if __name__ == "__main__":
    sys.stdout.write(f"{json.dumps(main(*map(int, sys.argv[1:])), indent=1)}\n")
