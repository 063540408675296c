"""The kinds of models that GPUs serve, where none is needed: checkpoints, trainer, bounds."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors import safe_open

from benchmarks.gpu.checkpoint import Files, write_checkpoint
from benchmarks.gpu.in_place import InPlaceTrainer
from benchmarks.gpu.kinds import KINDS, MOE30
from benchmarks.gpu.live_digests import live_digests
from benchmarks.gpu.model_parts import unlike
from benchmarks.gpu.trainer import Trainer
from benchmarks.gpu.wanted import MOE30_ROWS, beside
from weightsync.model.dtypes import torch_dtype

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def test_the_large_model_is_the_published_one() -> None:
    assert MOE30.full.spec.elements == 30_532_122_624
    assert len(MOE30.full.spec.tensors) == 18_867
    spec = MOE30.spec(small=False)
    assert len(spec.tensors) == 37_491
    assert 31.0e9 < spec.nbytes < 31.3e9


@pytest.mark.parametrize("name", KINDS)
def test_a_checkpoint_of_each_kind_is_one_for_everybody(name: str, tmp_path: Path) -> None:
    spec = KINDS[name].spec(small=True)
    write_checkpoint(tmp_path, spec)
    weights = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert list(weights) == list(spec.tensors)
    with Files(tmp_path) as files:
        for file in sorted(set(weights.values())):
            with safe_open(tmp_path / file, framework="pt") as opened:
                for tensor in opened.keys():  # noqa: SIM118 - it is no mapping
                    theirs = opened.get_tensor(tensor)
                    wanted = spec.tensors[tensor]
                    assert theirs.dtype is torch_dtype(wanted.dtype)
                    assert tuple(theirs.shape) == wanted.shape
                    assert bool(torch.isfinite(theirs.float()).all())
                    assert torch.equal(_raw(theirs), _raw(files.tensors[tensor]))


@pytest.mark.parametrize("name", KINDS)
def test_vllm_knows_each_kind(name: str, tmp_path: Path) -> None:
    configs = pytest.importorskip("vllm.transformers_utils.config")
    registry = pytest.importorskip("vllm.model_executor.models").ModelRegistry
    spec = KINDS[name].spec(small=True)
    (tmp_path / "config.json").write_text(json.dumps(spec.config))
    config = configs.get_config(tmp_path, trust_remote_code=False)
    (architecture,) = config.architectures
    assert architecture in registry.get_supported_archs()
    for key in ("hidden_size", "num_hidden_layers", "vocab_size"):
        assert getattr(config, key) == spec.config[key]
    if not KINDS[name].scales:
        assert not hasattr(config, "quantization_config")
        return
    fp8 = pytest.importorskip("vllm.model_executor.layers.quantization.fp8").Fp8Config
    found = fp8.from_config(config.quantization_config)
    assert found.is_checkpoint_fp8_serialized
    assert found.weight_block_size == [128, 128]
    # What the checkpoint has no scales for must be named.
    scaled = {n for n in spec.tensors if f"{n}_scale_inv" in spec.tensors}
    plain = {n for n, t in spec.tensors.items() if t.dtype == "BF16" and len(t.shape) == 2}
    plain -= {f"{n}_scale_inv" for n in scaled}
    assert {n.removesuffix(".weight") for n in plain} <= set(found.ignored_layers)
    assert not {n.removesuffix(".weight") for n in scaled} & set(found.ignored_layers)


def test_arguments_are_told_as_vllm_takes_them() -> None:
    assert KINDS["qwen3_fp8_online"].flags == ["--quantization", "fp8"]
    flag, value = KINDS["deepseek_mtp"].flags
    assert flag == "--speculative-config"
    assert json.loads(value) == {"method": "mtp", "num_speculative_tokens": 1}


@pytest.mark.parametrize("name", ["qwen3_moe_fp8", "deepseek_fp8"])
def test_a_trainer_without_a_copy_has_the_contents_of_one_with(name: str, tmp_path: Path) -> None:
    spec = KINDS[name].spec(small=True)
    write_checkpoint(tmp_path / "a", spec)
    write_checkpoint(tmp_path / "b", spec)
    holding, changing = Trainer("cpu", str(tmp_path / "a")), InPlaceTrainer(str(tmp_path / "b"))
    before = {n: _raw(t).clone() for n, t in holding.tensors.items()}
    for number in range(17):
        holding.change()
        changing.change()
        if number in (3, 16):
            assert holding.same_as(str(tmp_path / "b")) == {"same": True}
            for tensor_name, tensor in holding.tensors.items():
                assert bool((_raw(tensor) != before[tensor_name]).any())
                assert bool(torch.isfinite(tensor.float()).all()), tensor_name
    changing.write_first()
    assert Trainer("cpu", str(tmp_path / "a")).same_as(str(tmp_path / "b")) == {"same": True}
    changing.write_present()
    assert holding.same_as(str(tmp_path / "b")) == {"same": True}
    changing.close()


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


class _Kernel:
    """A helper object as vLLM's: it holds tensors that the module does not list."""

    __module__ = "vllm.somewhere"

    def __init__(self, scale: torch.Tensor) -> None:
        self.scales = [scale]


def _model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    packed = torch.arange(4.0)
    first: Any = model[0]
    first.register_buffer("cache", torch.arange(3))
    first.absorbed = torch.ones(2, 2)
    first.kernel = _Kernel(torch.full((3,), 2.0))
    first.apply_weights = lambda x: x * packed
    first.kv_cache = torch.zeros(9)
    return model


_HIDDEN: dict[str, Callable[[Any], torch.Tensor]] = {
    "0.weight": lambda m: m.weight.data,
    "0.cache": lambda m: m.cache,
    "0.absorbed": lambda m: m.absorbed,
    "0.kernel.scales.0": lambda m: m.kernel.scales[0],
    "0.apply_weights.packed": lambda m: m.apply_weights.__closure__[0].cell_contents,
}


@pytest.mark.parametrize("path", _HIDDEN)
def test_every_tensor_that_a_model_reads_is_digested(path: str) -> None:
    wanted = live_digests(_model())
    assert set(wanted) == {*_HIDDEN, "0.bias", "1.weight", "1.bias"}
    model = _model()
    assert unlike(live_digests(model), wanted) == []
    raw = _HIDDEN[path](model[0]).view(torch.uint8)
    raw.reshape(-1)[0] ^= 1
    assert unlike(live_digests(model), wanted) == [path]


def test_a_tensor_that_is_on_one_side_alone_is_named() -> None:
    assert unlike({"a": "1", "b": "2"}, {"a": "1", "c": "3"}) == ["b", "c"]


_RUN = {
    "transform": "twin", "live_bytes": 31e9, "d2d_gbps": 2100.0, "read_gbps": 4300.0,
    "vllm_pause_floor_s": 0.010, "token_gap_p50_s": 0.005, "pause_total_s": 0.070,
    "arena_bytes": 31e9, "device_bytes_used": 32e9, "device_bytes_used_peak": 65e9,
    "vllm_start_s": 60.0, "twin_load_s": 8.0, "restart_to_serving_s": 95.0,
    "reload_over_pause": 250.0, "twin_slowdown": 1.2, "twin_max_gap_s": 0.0099,
}  # fmt: skip


def test_the_bounds_of_the_large_model() -> None:
    rows = beside(_RUN, MOE30_ROWS)
    # 10 ms, a swap of 2 x 31 GB at 2.1 TB/s and a quarter, one and a half reads, and 15 ms.
    assert rows["pause_total_s"]["limit"] == pytest.approx(0.0727, abs=1e-4)
    met = {name: row["met"] for name, row in rows.items() if "met" in row}
    assert met == {
        "pause_total_s": True,
        "reload_over_pause": True,
        "twin_load_s": True,
        "twin_slowdown": False,
        "twin_max_gap_s": True,
        "device_bytes_used": True,
        "device_bytes_used_peak": False,
        "restart_to_serving_s": True,
    }
    assert rows["device_bytes_used"]["limit"] == 32.5e9
    assert rows["restart_to_serving_s"]["limit"] == 96.0


def test_a_pause_is_never_allowed_more_than_75_ms() -> None:
    slow = beside({**_RUN, "d2d_gbps": 500.0, "pause_total_s": 0.080}, MOE30_ROWS)
    assert (slow["pause_total_s"]["limit"], slow["pause_total_s"]["met"]) == (0.075, False)
    # A plan moves half of what a swap does.
    plan = beside({**_RUN, "transform": "plan"}, MOE30_ROWS)
    assert plan["pause_total_s"]["limit"] == pytest.approx(0.0543, abs=1e-4)
