"""Small models with loaders like vLLM's, and versions of them in shared memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import save

from tests.support.staging import Staging
from weightsync.model.layout import check_shard, check_version, parse_header
from weightsync.model.manifest import ShardEntry
from weightsync.vllm.cuda.uploader import Uploader
from weightsync.vllm.plan.load_watch import watch_loading

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from weightsync.model.manifest import Layout


class ToyModel(torch.nn.Module):
    """Fuses q and k, cuts rows and columns as rank `rank` of 2, ties or not, pads its embedding."""

    def __init__(self, *, rank: int = 0, tied: bool = False, dtype: Any = torch.float32) -> None:
        super().__init__()
        self.rank = rank
        self.tied = tied
        self.embed = torch.nn.Parameter(torch.zeros(8, 4, dtype=dtype), requires_grad=False)
        self.head = (
            self.embed
            if tied
            else torch.nn.Parameter(torch.zeros(8, 4, dtype=dtype), requires_grad=False)
        )
        self.qk = torch.nn.Parameter(torch.zeros(4, 4, dtype=dtype), requires_grad=False)
        self.qk_bias = torch.nn.Parameter(torch.zeros(4, dtype=dtype), requires_grad=False)
        self.down = torch.nn.Parameter(torch.zeros(4, 3, dtype=dtype), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.zeros(1, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, tensor in weights:
            self.load_one(name, tensor)
            loaded.add(name)
        return loaded

    def load_one(self, name: str, tensor: torch.Tensor) -> None:
        if name == "embed":
            self.embed[: tensor.shape[0]].data.copy_(tensor)
            self.embed[tensor.shape[0] :].data.fill_(0)
        elif name == "head":
            if not self.tied:
                assert tensor.shape[1] == 4
                self.head.data[: tensor.shape[0]].copy_(tensor)
        elif name in ("q", "k"):
            rows = tensor.narrow(0, self.rank * 2, 2)
            self.qk.data.narrow(0, 0 if name == "q" else 2, 2).copy_(rows)
        elif name in ("q_bias", "k_bias"):
            rows = tensor[self.rank * 2 : self.rank * 2 + 2]
            self.qk_bias.data.narrow(0, 0 if name == "q_bias" else 2, 2).copy_(rows)
        elif name == "down":
            self.down.data.copy_(tensor.narrow(1, self.rank * 3, 3))
        elif name == "scale":
            self.scale.data.fill_(tensor.item())
        else:
            raise KeyError(name)


def toy_tensors(
    seed: int, *, dtype: Any = torch.float32, tied: bool = False
) -> dict[str, torch.Tensor]:
    """Return a checkpoint of the toy model."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "embed": (6, 4), "head": (6, 4), "q": (4, 4), "k": (4, 4), "q_bias": (4,),
        "k_bias": (4,), "down": (4, 6), "scale": (),
    }  # fmt: skip
    made = {
        name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()
    }
    if tied:
        made["head"] = made["embed"].clone()
    return made


def layout_of(tensors: dict[str, torch.Tensor]) -> Layout:
    """Return the layout of tensors as one shard."""
    raw = save(tensors)
    size = int.from_bytes(raw[:8], "little")
    shard = ShardEntry("s", len(raw), size)
    return check_version([shard], [check_shard(shard, parse_header(raw[8 : 8 + size]))])


def load_for_real(model: ToyModel, tensors: dict[str, torch.Tensor]) -> ToyModel:
    """Load real tensors, as vLLM does at its start."""
    with torch.no_grad():
        model.load_weights(tensors.items())
    return model


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each slice that is sent to a device."""
    sizes: list[int] = []
    send_all = Uploader.send_all

    def noted(self: Uploader, target: torch.Tensor, source: torch.Tensor, *more: Any) -> None:
        send_all(self, target, source, *more)
        # Not before: what is interrupted is sent again.
        sizes.append(source.nbytes)

    monkeypatch.setattr(Uploader, "send_all", noted)
    return sizes


@pytest.fixture
def staging(tmp_path: Path) -> Iterator[Staging]:
    stage = Staging(tmp_path / "segments.sock")
    yield stage
    stage.close()


def watched_load(kind: Callable[[], Any], tensors: dict[str, torch.Tensor]) -> Any:
    """Return a model that was loaded as vLLM does it, before the eyes of our plugin.

    Args:
        kind: Makes it. What it has of a method `process` is called when it was loaded.
        tensors: Its checkpoint.
    """

    class BaseModelLoader:
        def load_model(self) -> Any:
            model = loaders.initialize_model()
            with torch.no_grad():
                model.load_weights(iter(tensors.items()))
                getattr(model, "process", bool)()
            return model

    loaders = SimpleNamespace(initialize_model=kind, BaseModelLoader=BaseModelLoader)
    watch_loading(loaders)
    return loaders.BaseModelLoader().load_model()
