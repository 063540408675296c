"""The live parameters of a model: found at every use, as loaders know them, and as their bytes.

After loading vLLM replaces the parameters of experts and quantised layers by plain ones, without
the class and attributes that loaders ask for. For a capture those are put back for a moment, where
what replaced them has the same form.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightsync.vllm.cpu_plain import packs_experts
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.plan.int_views import memory_of, tensor_digest_of
from weightsync.vllm.plan.model_parts import parts_of

if TYPE_CHECKING:
    from weightsync.vllm.plan.load_plan import Slice, Strides


class ParameterChangedError(Exception):
    """A parameter is no longer what it was when the load plan was captured."""


def view_of(tensor: torch.Tensor, part: Strides) -> torch.Tensor:
    return tensor.as_strided(part.shape, part.stride, tensor.storage_offset() + part.offset)


class LiveParameters:
    """Looks parameters and buffers up where the model's forward pass will look."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._places: dict[str, tuple[dict[str, torch.Tensor | None], str]] = {}
        seen: set[int] = set()
        for prefix, module in model.named_modules():
            for table in (module._parameters, module._buffers):  # noqa: SLF001
                for key, tensor in table.items():
                    # A tied parameter goes by its first name, as in torch's named_parameters.
                    if tensor is None or id(tensor) in seen:
                        continue
                    seen.add(id(tensor))
                    name = f"{prefix}.{key}" if prefix else key
                    self._places[name] = (table, key)

    def names(self) -> Iterable[str]:
        return self._places.keys()

    def tensor(self, name: str) -> torch.Tensor:
        """Return the present tensor, detached; raise ParameterChangedError if it is gone."""
        table, key = self._places[name]
        found = table.get(key)
        if found is None:
            raise ParameterChangedError(f"parameter {name} no longer exists; restart vLLM")
        return found.detach()

    def addresses(self, names: Iterable[str]) -> tuple[int, ...]:
        """Return where parameters lie; 0: the model has it no more. Cheap enough for a pause."""
        found = (table.get(key) for table, key in map(self._places.__getitem__, names))
        return tuple(0 if tensor is None else tensor.data_ptr() for tensor in found)

    def geometry(self, name: str) -> tuple[object, ...]:
        """Return what must not change between the capture of a plan and its use.

        On devices that includes the address, which captured graphs go on reading.
        """
        tensor = self.tensor(name)
        address = 0 if tensor.device.type == "cpu" else tensor.data_ptr()
        return (tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, address)

    def digests(self) -> dict[str, bytes]:
        return {name: tensor_digest_of(self.tensor(name)) for name in self._places}


class Targets:
    """The live destinations of a plan's slices, rebuilt whenever a parameter was replaced."""

    def __init__(self, live: LiveParameters, slices: Sequence[Slice]) -> None:
        self._live = live
        self._slices = slices
        self.names = sorted({item.param for item in slices})
        self.geometry = {name: live.geometry(name) for name in self.names}
        self._addresses: tuple[int, ...] = ()
        self._views: list[torch.Tensor] = []

    def views(self) -> list[torch.Tensor]:
        """Return one live view per slice, or raise ParameterChangedError: a geometry differs."""
        addresses = self._live.addresses(self.names)
        if addresses != self._addresses or not self._views:
            for name in self.names:
                if self._live.geometry(name) != self.geometry[name]:
                    raise ParameterChangedError(
                        f"parameter {name} was replaced since its load plan was made; restart vLLM"
                    )
            now: Mapping[str, torch.Tensor] = {n: self._live.tensor(n) for n in self.names}
            self._views = [view_of(now[item.param], item.target) for item in self._slices]
            self._addresses = addresses
        return self._views

    def param(self, name: str) -> torch.Tensor:
        """Return a parameter; `views` checks that it is still that of the plan."""
        return self._live.tensor(name)

    def memory(self, name: str) -> torch.Tensor:
        """Return the integers in a parameter's memory, as one row; call `views` first."""
        return memory_of(self._live.tensor(name))


@dataclass(frozen=True)
class _Created:
    tensor: weakref.ref[torch.Tensor]
    kind: type[torch.Tensor]
    attributes: Mapping[str, Any]
    form: tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class _Substitute:
    table: dict[str, Any]
    key: str
    live: torch.Tensor
    tensor: torch.Tensor

    def take_back(self) -> None:
        """Put the other one back, unless a loader has put something else there."""
        untouched = self.tensor.data_ptr() == self.live.data_ptr()
        if self.table.get(self.key) is self.tensor and untouched:
            self.table[self.key] = self.live


_created: weakref.WeakKeyDictionary[torch.nn.Module, dict[str, _Created]] = (
    weakref.WeakKeyDictionary()
)


def note_parameters(model: torch.nn.Module) -> None:
    """Remember what the parameters of a model are, before its weights are loaded."""
    _created[model] = {
        name: _Created(weakref.ref(p), type(p), dict(vars(p)), (p.shape, p.dtype))
        for name, p in model.named_parameters(remove_duplicate=False)
        if not p.is_meta
    }


@contextlib.contextmanager
def as_created(model: torch.nn.Module) -> Iterator[None]:
    """Let loaders find parameters as they were created, with the memory that they have now.

    A parameter of another shape or dtype stays as it is, and what a loader replaces stays replaced.
    """
    substitutes = list(_substitutes(model))
    try:
        for each in substitutes:
            each.table[each.key] = each.tensor
        yield
    finally:
        for each in substitutes:
            each.take_back()


def _substitutes(model: torch.nn.Module) -> Iterator[_Substitute]:
    known = {
        part.names.path + name: created
        for part in parts_of(model)
        for name, created in _created.get(part.module, {}).items()
    }
    for prefix, module in model.named_modules():
        table = module._parameters  # noqa: SLF001 - as `named_parameters` reads it
        for key, live in table.items():
            created = known.get(f"{prefix}.{key}" if prefix else key)
            if live is None or created is None or created.tensor() is live:
                continue
            if created.form != (live.shape, live.dtype):
                continue
            tensor = torch.Tensor._make_subclass(created.kind, live.data, require_grad=False)  # noqa: SLF001 - what Parameter itself is made with
            vars(tensor).update(created.attributes)
            yield _Substitute(table, key, live, tensor)


_REMEDY = "restart vLLM with WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1"
_NO_REMEDY = "WEIGHTSYNC_CPU_PLAIN_WEIGHTS=1 does not prevent that here; "
_OTHERWISE = (
    "restart vLLM with 0, for this processor has AMX, whose kernels hold weights in tensors, which "
    "are loaded beside generation, or "
)
_GPU = "serve the model on a GPU"


def _captures_a_copy(function: Callable[..., object]) -> bool:
    # vLLM sets `layer.cpu_linear` to a function that uses the layer's weight argument, or to one
    # that holds a packed copy: closed over (oneDNN, sgl) or as a default (zentorch).
    return bool(getattr(function, "__closure__", None) or getattr(function, "__defaults__", None))


def remedy_of(*, plain: bool) -> str:
    """Return what helps where vLLM on a CPU packed weights, although started `plain` or not."""
    if not plain:
        return _REMEDY
    amx = bool(torch.cpu._is_amx_tile_supported())  # noqa: SLF001 - what vLLM itself asks
    return f"{_NO_REMEDY}{_OTHERWISE if amx else ''}{_GPU}"


class NotPlain(NamedTuple):
    cause: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.cause}; {self.remedy}"


def why_not_plain(model: torch.nn.Module) -> NotPlain | None:
    """Return None if every parameter is what the forward pass reads."""
    settings = EngineSettings.load()
    remedy = remedy_of(plain=settings.cpu_plain_linear)
    for name, module in model.named_modules():
        function = vars(module).get("cpu_linear")
        packed = function is not None and _captures_a_copy(function)
        if packed or "_cpu_unpacked_conv_weight" in vars(module):
            cause = f"vLLM computes {name} from a repacked copy of its weights"
            return NotPlain(cause, remedy)
        if packs_experts(module):
            cure = remedy_of(plain=settings.cpu_plain_experts)
            return NotPlain(f"vLLM has repacked the experts of {name}", cure)
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            cause = f"parameter {name} has no memory (another weight update is running)"
            return NotPlain(cause, "restart vLLM")
        if parameter.numel() == 0:
            return NotPlain(f"vLLM has repacked parameter {name} and emptied it", remedy)
    return None
