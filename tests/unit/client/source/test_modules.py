"""A module is pushed as its checkpoint has it, shown against the libraries that wrap modules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.swa_utils import AveragedModel

from tests.support.models import untrained
from weightsync_client import InvalidError
from weightsync_client.source.modules import module_tensors
from weightsync_client.source.source import make_source

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


class _Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
        self.register_buffer("scale", torch.ones(4))
        self.register_buffer("cache", torch.ones(4), persistent=False)


PLAIN = {"layers.0.weight", "layers.0.bias", "layers.1.weight", "layers.1.bias", "scale"}


def _compiled(module: torch.nn.Module) -> torch.nn.Module:
    """What PyTorch calls a callable is a module around a module."""
    return cast("torch.nn.Module", torch.compile(module))


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    meet = (tmp_path / "meet").as_uri()
    torch.distributed.init_process_group("gloo", init_method=meet, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_a_module_is_pushed_as_its_state_dict() -> None:
    model = _Model()
    source = make_source(model, 1 << 20)
    assert {tensor.name for tensor in source.tensors} == PLAIN
    assert source.again
    found = module_tensors(model)
    assert found["layers.0.weight"].data_ptr() == model.layers[0].weight.data_ptr()  # type: ignore[operator]  # a parameter's


def test_a_sequence_of_modules_is_a_module_too() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    names = {tensor.name for tensor in make_source(model, 1 << 20).tensors}
    assert names == {"0.weight", "0.bias", "1.weight", "1.bias"}


@pytest.mark.usefixtures("group")
def test_wrappers_leave_no_trace_in_the_names() -> None:
    model = _Model()
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = _compiled(model.layers[1])
    assert "layers.0._checkpoint_wrapped_module.weight" in dict(model.named_parameters())
    assert "layers.1._orig_mod.weight" in model.state_dict()
    for wrapped in (
        model,
        _compiled(model),
        torch.nn.parallel.DistributedDataParallel(model),
        _compiled(torch.nn.parallel.DistributedDataParallel(model)),
        torch.nn.parallel.DistributedDataParallel(_compiled(model)),
        torch.nn.DataParallel(model),
        AveragedModel(model),
        torch.nn.parallel.DistributedDataParallel(AveragedModel(model)),
        AveragedModel(_compiled(model)),
    ):
        assert set(module_tensors(wrapped)) == PLAIN


def test_a_part_of_a_model_may_be_called_module() -> None:
    class Inner(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = torch.nn.Linear(4, 4)

    assert set(module_tensors(Inner())) == {"module.weight", "module.bias"}


def test_state_that_is_no_tensor_of_the_model_is_left_out() -> None:
    class Keeping(torch.nn.Linear):
        def get_extra_state(self) -> dict[str, int]:
            return {"steps": 1}

        def set_extra_state(self, state: Any) -> None:
            del state

    assert set(module_tensors(Keeping(4, 4))) == {"weight", "bias"}


def test_two_tensors_of_one_name_are_refused() -> None:
    model = _Model()
    model.layers.add_module("_orig_mod", torch.nn.ModuleList([torch.nn.Linear(4, 4)]))
    with pytest.raises(InvalidError, match=r"two tensors of the module are called 'layers\.0\."):
        module_tensors(model)


@pytest.mark.parametrize("kind", ["tied", "untied", "experts"])
def test_a_model_of_transformers_is_pushed_as_it_is_saved(kind: str, tmp_path: Path) -> None:
    model = untrained(kind)
    model.save_pretrained(tmp_path)
    saved = load_file(tmp_path / "model.safetensors")
    found = module_tensors(_compiled(model))
    assert found.keys() == saved.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, saved[name]), name
