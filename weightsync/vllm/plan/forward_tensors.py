"""Every tensor that a model's forward pass can reach: parameters, buffers, and what nobody lists.

vLLM keeps tensors beside parameters: as bare attributes of modules, in helper objects (a kernel, an
attention backend), in closures of functions that it puts on layers. `named_parameters` shows none
of them.
"""

from __future__ import annotations

import enum
import functools
import types
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

__all__ = ["NumberPlace", "Reached", "forward_tensors", "reach"]

#: Modules whose objects hold no tensor of a model, and much that is costly to look at.
_FOREIGN = frozenset(
    {"asyncio", "concurrent", "ctypes", "logging", "multiprocessing", "numpy", "threading", "torch"}
)
_LEAVES = (str, bytes, int, float, complex, type, types.ModuleType, enum.Enum, type(None))
#: Base classes of vLLM's configurations that lie beside its layers.
_CONFIGS = frozenset({"QuantizationConfig"})
_TABLES = ("_parameters", "_buffers", "_modules")


def forward_tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor that can be reached from a model, with a path to it.

    Followed are modules, attributes, slots, lists, tuples, sets, dictionaries, and what functions
    close over, have as defaults or are bound to; not what is global to a Python module. One tensor
    may come under several paths, its shortest from a module first. Parameters and buffers have the
    names that torch gives them.

    Args:
        model: Looked at only: no property of any object is evaluated.
    """
    for place, child, _, _ in _walk(model):
        if isinstance(child, torch.Tensor):
            yield place, child


class NumberPlace(NamedTuple):
    """An attribute that holds a number, and what has that attribute."""

    owner: Any
    name: str

    @property
    def writable(self) -> bool:
        """Whether it is an attribute that can be set to another number, and nothing hidden."""
        return self.name in _attributes(self.owner)

    def read(self) -> float | None:
        """Return the number; None: there is none any more."""
        found = _attributes(self.owner).get(self.name)
        return found if type(found) is float else None

    def write(self, number: float) -> None:
        """Set it."""
        _attributes(self.owner)[self.name] = number


@dataclass(frozen=True)
class Reached:
    """What one walk through a model finds.

    Attributes:
        tensors: As `forward_tensors` yields them.
        numbers: Every Python float that a module or a helper object holds, by path. VLLM reads
            scales out of tensors when it loads, and hands them to kernels as numbers. What
            configurations hold is left out: it comes from no weight, and times that it took are in
            it.
        places: Where these are.
    """

    tensors: Sequence[tuple[str, torch.Tensor]]
    numbers: Mapping[str, float]
    places: Mapping[str, NumberPlace]


def reach(model: torch.nn.Module) -> Reached:
    """Return every tensor and every number that can be reached from a model."""
    tensors: list[tuple[str, torch.Tensor]] = []
    numbers: dict[str, float] = {}
    places: dict[str, NumberPlace] = {}
    for place, child, owner, name in _walk(model):
        if isinstance(child, torch.Tensor):
            tensors.append((place, child))
        elif type(child) is float and not _is_config(owner):
            numbers[place] = child
            places[place] = NumberPlace(owner, name)
    return Reached(tensors, numbers, places)


def _is_config(owner: Any) -> bool:
    kinds = type(owner).__mro__
    return any(
        kind.__module__.startswith(("vllm.config", "transformers")) or kind.__name__ in _CONFIGS
        for kind in kinds
    )


def _walk(model: torch.nn.Module) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield tensors and floats, each with a path, with what holds it, and as what."""
    ahead: deque[tuple[str, Any]] = deque(model.named_modules())
    seen = {id(module) for _, module in ahead}
    while ahead:
        path, value = ahead.popleft()
        for name, child in _children(value):
            place = name if not path else f"{path}{'' if name.startswith('[') else '.'}{name}"
            if isinstance(child, torch.Tensor | float):
                yield place, child, value, name
            elif not isinstance(child, _LEAVES) and id(child) not in seen:
                seen.add(id(child))
                ahead.append((place, child))


def _children(value: Any) -> Iterable[tuple[str, Any]]:
    if isinstance(value, torch.nn.Module):
        return _of_module(value)
    if isinstance(value, dict):
        return [(f"[{key!r:.80}]", child) for key, child in list(value.items())]
    if isinstance(value, list | tuple | set | frozenset | deque):
        return [(f"[{index}]", child) for index, child in enumerate(list(value))]
    if isinstance(value, types.FunctionType):
        return _of_function(value)
    if isinstance(value, types.MethodType):
        return [("__self__", value.__self__), ("__func__", value.__func__)]
    if isinstance(value, functools.partial):
        return [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    return _of_object(value)


def _of_module(module: torch.nn.Module) -> Iterator[tuple[str, Any]]:
    for table in _TABLES:
        yield from list(vars(module)[table].items())
    for name, child in list(vars(module).items()):
        if name not in _TABLES:
            yield name, child


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            yield f"<{name}>", cell.cell_contents
        except ValueError:
            # Not bound yet.
            continue
    yield "__defaults__", function.__defaults__
    yield "__kwdefaults__", function.__kwdefaults__
    yield from list(vars(function).items())


def _of_object(value: Any) -> Iterator[tuple[str, Any]]:
    kind = type(value)
    if kind.__module__.partition(".")[0] in _FOREIGN:
        return
    yield from list(_attributes(value).items())
    for base in kind.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            place = vars(base).get(name)
            if isinstance(place, types.MemberDescriptorType):
                try:
                    yield name, place.__get__(value, kind)
                except AttributeError:
                    continue


def _attributes(value: Any) -> dict[str, Any]:
    # Not `vars`: an object may answer for its attributes itself.
    try:
        found: dict[str, Any] = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return {}
    return found
