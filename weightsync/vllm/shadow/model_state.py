"""What the weights of a model have become in memory: where each tensor lies, and which share it.

Two loads of one version must have the same form, the same tensors at the same places of the same
pieces of memory: then their bytes may be exchanged without a look at what they mean. vLLM itself
does not notice a missing or a foreign tensor of a quantised model, and converts a wrong dtype
without a word. A loader that takes the place of another has nothing to compare its first load with:
its rank has.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from weightsync.model.layout import unlike
from weightsync.model.manifest import Layout, TensorEntry
from weightsync.vllm.env import EngineSettings
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.live_params import remedy_of
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.load_watch import (
    NumberPlace,
    Reached,
    loaded_numbers,
    made_by_loading,
    reach,
    small_floats,
)

if TYPE_CHECKING:
    TensorDigests = Callable[[Mapping[str, torch.Tensor]], dict[str, bytes]]


#: What vLLM calls the address of weights that oneDNN has packed, in the memory of one process.
_HANDLE = "handler_tensor"
#: Of a tensor without elements, or on another device.
_NOWHERE = -1


@dataclass(frozen=True)
class TensorForm:
    """One tensor; `shape` and `stride` count elements, `dtype` is torch's without `torch.`.

    Its first byte is `offset` in the piece of memory `span`, -1 if it has none.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    span: int
    offset: int


@dataclass(frozen=True)
class StateForm:
    """Where all of it lies: tensors by path, and the bytes of each piece of memory.

    `values` are digests of tensors in the host's memory beside those of a device, and numbers that
    no attribute holds; "" for every other number, which a version may bring.
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
        tensors = {path: dataclasses.astuple(form) for path, form in self.tensors.items()}
        return {"tensors": tensors, "spans": list(self.spans), "values": dict(self.values)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> StateForm:
        tensors = {
            path: TensorForm(dtype, tuple(shape), tuple(stride), span, offset)
            for path, (dtype, shape, stride, span, offset) in document["tensors"].items()
        }
        return cls(tensors, tuple(document["spans"]), dict(document["values"]))


@dataclass(frozen=True)
class ModelState:
    """The weights of a model as they lie in memory, each piece a row of bytes.

    `others` has the digest of every tensor that is no part of it. `numbers` are what kernels are
    called with, by path, as bits (no NaN is equal to itself), as far as attributes hold them;
    `later` are paths of those that came after loading: kernels made them when they ran first.
    """

    form: StateForm
    memory: Sequence[torch.Tensor]
    others: Mapping[str, bytes]
    numbers: Mapping[str, str] = field(default_factory=dict)
    places: Mapping[str, NumberPlace] = field(default_factory=dict)
    later: Collection[str] = ()


def weight_paths(model: torch.nn.Module) -> frozenset[str]:
    """Return the paths of the parameters, and of what loading made, or may have made.

    A scale that is the same as without a checkpoint's may be another one with the next version.
    Raises PlanRefusedError if nobody saw the model being loaded.
    """
    return _weight_paths(model, reach(model))


def _weight_paths(model: torch.nn.Module, reached: Reached) -> frozenset[str]:
    made = made_by_loading(model)
    if made is None:
        raise PlanRefusedError(
            "start vLLM with VLLM_PLUGINS=weightsync and --load-format auto: the load of the "
            "weights was not observed"
        )
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

    `paths` None are those of `weight_paths`, and `numbers` None those of `loaded_numbers`, or all.
    Without `digests` other tensors are not looked at. A tensor that is missing, or lies in memory
    that cannot be exchanged, is refused.
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
        what = remedy_of(plain=plain) if packed else "this model cannot be updated"
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
    msg = (
        "this model cannot be updated: these tensors have memory between them that belongs to "
        "others"
    )
    raise PlanRefusedError(msg, sorted(inside))


def _distinct(tensor: torch.Tensor) -> int:
    """Return how many elements lie in memory: repeated ones lie there once."""
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(length for length, step in steps if step)


def _unlike(left: Mapping[str, object], right: Mapping[str, object]) -> set[str]:
    return {path for path in left.keys() | right.keys() if left.get(path) != right.get(path)}


def check_same(layout: Layout, checkpoint: Layout, *, whole: bool = True) -> None:
    """Refuse a version, or a part of one, with other tensors than the engine's checkpoint."""
    if layout.signature == checkpoint.signature:
        return
    known = {tensor.name: tensor for tensor in checkpoint.tensors}
    unknown = [tensor.name for tensor in layout.tensors if tensor.name not in known]
    if unknown:
        msg = "leave them out: the engine's checkpoint has no such tensors"
        raise PlanRefusedError(msg, unknown)
    shapes = [t for t in layout.tensors if t.shape != known[t.name].shape]
    if shapes:
        clause = _differs(shapes[0], known)
        msg = f"push its model: {clause}; a different shape than in the engine's checkpoint"
        raise PlanRefusedError(msg, [t.name for t in shapes])
    dtypes = [t for t in layout.tensors if t.dtype != known[t.name].dtype]
    if dtypes:
        clause = _differs(dtypes[0], known)
        msg = (
            f"convert before the push: {clause}; a different dtype than in the engine's "
            "checkpoint, from which vLLM computes its weights"
        )
        raise PlanRefusedError(msg, [t.name for t in dtypes])
    missing = known.keys() - {tensor.name for tensor in layout.tensors}
    if whole and missing:
        msg = "push all of them: the version lacks these tensors of the model"
        raise PlanRefusedError(msg, sorted(missing))


def _differs(tensor: TensorEntry, known: Mapping[str, TensorEntry]) -> str:
    wanted = known[tensor.name]
    return unlike(tensor.name, (tensor.dtype, tensor.shape), (wanted.dtype, wanted.shape))


@dataclass(frozen=True)
class LoadFacts:
    """What a load tells beside its form; loaders that start later are given `same_as`.

    `others` has the digest of every tensor that is not exchanged, by path. `unread` names tensors
    of which no byte was read, and `same_as` which of those repeat which (see `LoadPlan`).
    """

    others: Mapping[str, str]
    unread: frozenset[str]
    same_as: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        facts = {"others": dict(self.others), "unread": sorted(self.unread)}
        return {**facts, "same_as": dict(self.same_as)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LoadFacts:
        unread = frozenset(document["unread"])
        return cls(dict(document["others"]), unread, dict(document["same_as"]))

    def check(self, first: LoadFacts) -> None:
        """Refuse a load that is unlike the first one; a PlanRefusedError has what differs."""
        changed = {
            path
            for path in first.others.keys() | self.others.keys()
            if first.others.get(path) != self.others.get(path)
        }
        if changed:
            msg = "vLLM makes these tensors from the weights, and they are not exchanged"
            raise PlanRefusedError(msg, sorted(changed))
        lost = self.unread - first.unread
        if lost:
            msg = "vLLM loads nothing from these tensors of the version, as it did before"
            raise PlanRefusedError(msg, sorted(lost))


def check_numbers(numbers: Mapping[str, str], live: ModelState, fixed: str) -> None:
    """Refuse a version with other numbers where what runs would not notice them."""
    changed = [path for path, bits in numbers.items() if live.numbers.get(path) != bits]
    if not changed:
        return
    if not fixed and live.later:
        fixed = f"kernels have made {min(live.later)} when they ran first; restart vLLM to serve it"
    if fixed:
        msg = f"this version has different numbers than the live version, and {fixed}"
        raise PlanRefusedError(msg, changed)
