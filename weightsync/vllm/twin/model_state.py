"""What the weights of a model have become in memory: where each tensor lies, and which share it.

Two loads of one version must have the same form: the same tensors at the same places of the same
pieces of memory. Then their bytes may be exchanged without a look at what they mean.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weightsync.vllm.env import EngineSettings
from weightsync.vllm.plan.forward_tensors import reach
from weightsync.vllm.plan.in_place import remedy_of
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.load_watch import loaded_numbers, made_by_loading, small_floats

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from weightsync.vllm.plan.forward_tensors import NumberPlace, Reached

    TensorDigests = Callable[[Mapping[str, torch.Tensor]], dict[str, bytes]]

__all__ = ["ModelState", "StateForm", "TensorForm", "state_of", "weight_paths"]

#: What vLLM calls the address of weights that oneDNN has packed, in the memory of one process.
_HANDLE = "handler_tensor"
#: Of a tensor without elements, or on another device.
_NOWHERE = -1


@dataclass(frozen=True)
class TensorForm:
    """One tensor.

    Attributes:
        dtype: As torch names it, without `torch.`.
        shape: Elements.
        stride: Elements.
        span: Index of the piece of memory that it lies in; -1: it has none.
        offset: Of its first byte in that piece.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    offset: int


@dataclass(frozen=True)
class StateForm:
    """Where all of it lies.

    Attributes:
        tensors: By path.
        spans: Bytes of each piece of memory.
        values: What is compared by value: the digests of tensors that lie in the host's memory
            beside those of a device, and numbers that no attribute holds; "" for every other
            number, which a version may bring.
    """

    tensors: Mapping[str, TensorForm]
    spans: Sequence[int]
    values: Mapping[str, str]

    def differences(self, other: StateForm) -> list[str]:
        """Return the paths at which two forms differ, sorted."""
        wrong = _unlike(self.tensors, other.tensors) | _unlike(self.values, other.values)
        if not wrong and tuple(self.spans) != tuple(other.spans):
            return sorted(self.tensors)
        return sorted(wrong)

    def named(self, span: int) -> str:
        """Return the path of a tensor in a piece of memory."""
        return next(path for path, form in self.tensors.items() if form.span == span)

    def to_json(self) -> dict[str, Any]:
        """Return it as `from_json` reads it."""
        tensors = {path: dataclasses.astuple(form) for path, form in self.tensors.items()}
        return {"tensors": tensors, "spans": list(self.spans), "values": dict(self.values)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StateForm:
        """Read what `to_json` returned."""
        tensors = {
            path: TensorForm(dtype, tuple(shape), tuple(stride), span, offset)
            for path, (dtype, shape, stride, span, offset) in document["tensors"].items()
        }
        return cls(tensors, tuple(document["spans"]), dict(document["values"]))


@dataclass(frozen=True)
class ModelState:
    """The weights of a model as they lie in memory.

    Attributes:
        form: Where they lie.
        memory: Each piece of memory, as a row of bytes.
        others: Digest of every tensor that is no part of it, by path.
        numbers: What kernels are called with, by path, as bits: no NaN is equal to itself. Those
            that attributes hold.
        places: Where these numbers are.
        later: Paths of numbers that came after loading: kernels made them when they ran first.
    """

    form: StateForm
    memory: Sequence[torch.Tensor]
    others: Mapping[str, bytes]
    numbers: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, NumberPlace] = field(default_factory=dict)
    later: Collection[str] = ()


def weight_paths(model: torch.nn.Module) -> frozenset[str]:
    """Return the paths of the parameters, and of what loading made beside them, or may have made.

    A scale that is the same as without a checkpoint's may be another one with the next version.

    Raises:
        PlanRefusedError: Nobody saw the model being loaded.
    """
    return _weight_paths(model, reach(model))


def _weight_paths(model: torch.nn.Module, reached: Reached) -> frozenset[str]:
    made = made_by_loading(model)
    if made is None:
        msg = (
            "nobody saw what vLLM made of the weights when it loaded them; start vLLM with "
            "VLLM_PLUGINS=weightsync and --load-format auto"
        )
        raise PlanRefusedError(msg)
    # Not torch's names: a module that stands in two places has two there, and one here.
    parameters = (path for path, t in reached.tensors if isinstance(t, torch.nn.Parameter))
    return made.union(parameters, _small(model, reached))


def _small(model: torch.nn.Module, reached: Reached) -> Iterator[str]:
    device, small = next(model.parameters()).device, small_floats(model) or frozenset()
    # What lies elsewhere is compared by value, and not exchanged.
    yield from (path for path, t in reached.tensors if path in small and t.device == device)


def state_of(
    model: torch.nn.Module,
    paths: Collection[str] | None = None,
    digests: TensorDigests | None = None,
    numbers: Collection[str] | None = None,
) -> ModelState:
    """Return the state of a model. Reads no bytes of the device, but with `digests`.

    Args:
        model: Loaded.
        paths: Of the tensors that belong to it; None: as `weight_paths` has them.
        digests: Digests the other tensors; None: they are not looked at.
        numbers: Paths of those that belong to it; None: as `loaded_numbers` has them, or all.

    Raises:
        PlanRefusedError: A tensor is missing, or lies in memory that cannot be exchanged; named.
    """
    reached = reach(model)
    wanted = _weight_paths(model, reached) if paths is None else paths
    found: dict[str, torch.Tensor] = {}
    others: dict[str, torch.Tensor] = {}
    for path, tensor in reached.tensors:
        if path in wanted:
            found.setdefault(path, tensor.detach())
        elif digests is not None and not _is_opaque(tensor):
            others[path] = tensor.detach()
    missing = sorted(set(wanted) - found.keys())
    if missing:
        msg = "the model has lost these tensors since it was loaded; restart vLLM"
        raise PlanRefusedError(msg, missing)
    digested = digests(others) if digests is not None else {}
    device = next(model.parameters()).device
    ordered = {path: found[path] for path in sorted(found)}
    known = loaded_numbers(model) if numbers is None else numbers
    bits = {p: n.hex() for p, n in reached.numbers.items() if known is None or p in known}
    places = {path: reached.places[path] for path in bits if reached.places[path].writable}
    values = {path: "" if path in places else number for path, number in bits.items()}
    state = _laid_out(device, ordered, values, digested)
    return dataclasses.replace(
        state,
        numbers={path: bits[path] for path in sorted(places)},
        places=places,
        later=reached.numbers.keys() - bits.keys(),
    )


def _laid_out(
    device: torch.device,
    tensors: Mapping[str, torch.Tensor],
    numbers: Mapping[str, str],
    others: Mapping[str, bytes],
) -> ModelState:
    opaque = [p for p, tensor in tensors.items() if _is_opaque(tensor) or p.endswith(_HANDLE)]
    if opaque:
        packed = any(path.endswith(_HANDLE) for path in opaque)
        plain = EngineSettings.load().cpu_plain_linear
        what = remedy_of(plain=plain) if packed else "this model is refused"
        msg = f"vLLM holds these weights in memory that cannot be copied; {what}"
        raise PlanRefusedError(msg, opaque)
    here = {path: t for path, t in tensors.items() if t.device == device and t.numel()}
    spans = _spans(here)
    order = {span: index for index, span in enumerate(dict.fromkeys(spans.values()))}
    forms = {}
    values = dict(numbers)
    for path, tensor in tensors.items():
        begin = spans[path][0] if path in here else 0
        forms[path] = TensorForm(
            str(tensor.dtype).removeprefix("torch."),
            tuple(tensor.shape),
            tuple(tensor.stride()),
            order[spans[path]] if path in here else _NOWHERE,
            tensor.data_ptr() - begin if path in here else 0,
        )
        if path not in here and tensor.numel():
            values[path] = tensor_digest_of(tensor).hex()
    inside: dict[tuple[int, int], dict[str, torch.Tensor]] = {span: {} for span in order}
    for path, span in spans.items():
        inside[span][path] = here[path]
    memory = [_bytes_of(span, found) for span, found in inside.items()]
    sizes = tuple(row.numel() for row in memory)
    return ModelState(StateForm(forms, sizes, values), memory, others)


def _is_opaque(tensor: torch.Tensor) -> bool:
    return tensor.layout is not torch.strided or tensor.is_meta


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the addresses of a tensor's first byte and behind its last one."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    last = sum((length - 1) * step for length, step in steps)
    begin = tensor.data_ptr()
    return begin, begin + (last + 1) * tensor.element_size()


def _spans(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[int, int]]:
    """Return, by path, the range of addresses in which a tensor lies with those that overlap it."""
    extents = {path: _extent(tensor) for path, tensor in tensors.items()}
    merged: list[list[int]] = []
    for begin, end in sorted(extents.values()):
        if merged and begin < merged[-1][1]:
            merged[-1][1] = max(end, merged[-1][1])
        else:
            merged.append([begin, end])
    starts = {begin: (begin, end) for begin, end in merged}
    ordered = sorted(starts)
    found, at = {}, 0
    for path in sorted(extents, key=lambda path: extents[path][0]):
        while at + 1 < len(ordered) and ordered[at + 1] <= extents[path][0]:
            at += 1
        found[path] = starts[ordered[at]]
    # In the order of the paths, which is the same in every process.
    return {path: found[path] for path in tensors}


def _bytes_of(span: tuple[int, int], inside: Mapping[str, torch.Tensor]) -> torch.Tensor:
    begin, end = span
    covered = sum(_distinct(tensor) * tensor.element_size() for tensor in inside.values())
    for tensor in inside.values():
        storage = tensor.untyped_storage()
        offset = begin - storage.data_ptr()
        if covered >= end - begin and offset >= 0 and offset + end - begin <= storage.nbytes():
            row = torch.empty(0, dtype=torch.uint8, device=tensor.device)
            return row.set_(storage, offset, (end - begin,), (1,))
    msg = "these tensors have memory between them that is not theirs; this model is refused"
    raise PlanRefusedError(msg, sorted(inside))


def _distinct(tensor: torch.Tensor) -> int:
    """Return how many elements lie in memory: repeated ones lie there once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(length for length, step in steps if step)


def _unlike(left: Mapping[str, object], right: Mapping[str, object]) -> set[str]:
    return {path for path in left.keys() | right.keys() if left.get(path) != right.get(path)}
