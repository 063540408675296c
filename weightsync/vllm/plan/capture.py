"""Captures the load plan by running the model's own weight loaders on tensors without bytes.

No real tensor of the model is written: the dispatch mode sees every operation of this thread,
records the copies into parameters and performs none. What is no plain copy is refused by name.
"""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightsync.model.dtypes import safetensors_dtype, torch_dtype
from weightsync.model.manifest import Layout, TensorEntry
from weightsync.vllm.plan.live_params import LiveParameters, as_created
from weightsync.vllm.plan.load_plan import (
    LoadPlan,
    PlanRefusedError,
    Slice,
    Strides,
    check_overlap,
    without_repeats,
)
from weightsync.vllm.plan.model_parts import ModelPart, draft_params, parts_of
from weightsync.vllm.plan.read_watch import written_by

if TYPE_CHECKING:
    #: Digests every parameter and buffer, by name.
    Digests = Callable[[], dict[str, bytes]]


_aten = torch.ops.aten
_FILLS = (_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default)
# Operations that change at most dtype and device of an input, not the order of its elements.
_CONVERSIONS = (_aten._to_copy.default, _aten.clone.default)  # noqa: SLF001
# What torch.compile calls the module inside the one that it returns.
_COMPILED = "_orig_mod"
# Characters of a loader's own error.
_MAX_TEXT = 140


class _Origin(NamedTuple):
    name: str
    offset: int
    dtype: torch.dtype


class _Home(NamedTuple):
    name: str
    tensor: torch.Tensor


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001


def _strides(tensor: torch.Tensor, first: int) -> Strides:
    return Strides(
        int(tensor.storage_offset()) - first, tuple(tensor.shape), tuple(tensor.stride())
    )


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, live: LiveParameters) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.slices: list[Slice] = []
        #: Tensors of a draft that its target has, too: where they would be loaded.
        self.shared: list[tuple[str, str, Strides]] = []
        #: What the paths of the part begin with that is being loaded.
        self.path = ""
        self.refused: dict[str, str] = {}
        self.current = ""
        self._derived: set[str] = set()
        self._origins: dict[int, _Origin] = {}
        self._scalar: tuple[_Origin, torch.Tensor] | None = None
        self._homes: dict[int, list[_Home]] = {}
        # Storages are known by address; holding what they belong to keeps addresses unique.
        self._alive: list[torch.Tensor] = []
        for name in live.names():
            tensor = live.tensor(name)
            self._homes.setdefault(_storage(tensor), []).append(_Home(name, tensor))

    def feed(self, layout: Layout, part: ModelPart) -> Iterator[tuple[str, torch.Tensor]]:
        for entry in layout.tensors:
            name = part.names.own_name(entry.name)
            if name is None:
                continue
            dtype = torch_dtype(entry.dtype)
            if dtype is None:
                msg = f"this torch has no dtype {entry.dtype}; push the model in another dtype"
                raise PlanRefusedError(msg, [entry.name])
            tensor = torch.empty(entry.shape, dtype=dtype, device="meta")
            self._remember(tensor, _Origin(entry.name, 0, dtype))
            self.current = entry.name
            yield name, tensor

    def _remember(self, tensor: torch.Tensor, origin: _Origin) -> None:
        self._origins[_storage(tensor)] = origin
        self._alive.append(tensor)

    def _origin(self, value: object) -> _Origin | None:
        if isinstance(value, torch.Tensor) and value.is_meta:
            return self._origins.get(_storage(value))
        return None

    def _is_live(self, value: object) -> bool:
        if not isinstance(value, torch.Tensor) or value.is_meta:
            return False
        return _storage(value) in self._homes

    def _refuse(self, why: str) -> None:
        self.refused.setdefault(self.current, why)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = dict(kwargs or {})
        written = written_by(func, args, kwargs)
        if any(self._is_live(value) for value in written):
            self._write(func, args)
            return written[0]
        first: Any = args[0] if args else None
        origin = self._origin(first)
        if origin is not None and func is _aten._local_scalar_dense.default:  # noqa: SLF001
            self._note_scalar((origin, first))
            return 0
        if origin is not None and func in _CONVERSIONS:
            # A copy to the device would need bytes; where the elements come from stays the same.
            kwargs.pop("device", None)
            result = func(*args, **kwargs)
            self._convert(origin, first, result)
            return result
        result = func(*args, **kwargs)
        self._note_derived(args, result)
        return result

    def finish(self) -> None:
        """Refuse what was read but copied nowhere: its content went where nobody sees it."""
        self._note_scalar(None)
        loaded = {item.tensor for item in self.slices}
        for name in sorted(self._derived - loaded):
            self.refused.setdefault(name, "its loader computes with it")

    @property
    def used(self) -> set[str]:
        return {item.tensor for item in self.slices} | self.refused.keys() | self._derived

    def _note_scalar(self, scalar: tuple[_Origin, torch.Tensor] | None) -> None:
        if self._scalar is not None:
            self.refused.setdefault(self._scalar[0].name, "its loader reads its value")
        self._scalar = scalar

    def _note_derived(self, args: tuple[Any, ...], result: object) -> None:
        if isinstance(result, torch.Tensor) and self._origin(result) is None:
            flat = [v for a in args for v in (a if isinstance(a, list | tuple) else [a])]
            self._derived |= {found.name for found in map(self._origin, flat) if found}

    def _convert(self, origin: _Origin, before: torch.Tensor, after: torch.Tensor) -> None:
        # Rounding twice differs from rounding once, so only one change of dtype is followed.
        if before.is_contiguous() and after.is_contiguous() and before.dtype == origin.dtype:
            offset = origin.offset + int(before.storage_offset())
            self._remember(after, _Origin(origin.name, offset, origin.dtype))

    def _write(self, func: Any, args: tuple[Any, ...]) -> None:
        target = args[0]
        if func is _aten.copy_.default or (
            func is _aten.fill_.Tensor and self._origin(args[1]) is not None
        ):
            self._copy(target, args[1])
        elif func in _FILLS:
            scalar = self._scalar
            # `param.fill_(tensor.item())` is how scalars are loaded; other fills are padding, which
            # was written when the engine loaded its checkpoint and never changes.
            if scalar is not None and func is _aten.fill_.Scalar and target.numel() == 1:
                self._scalar = None
                self._record(target, scalar[1].reshape(target.shape), scalar[0])
        else:
            self._refuse(f"its loader changes parameters by {func.name()}")

    def _copy(self, target: torch.Tensor, source: object) -> None:
        origin = self._origin(source)
        if origin is None or not isinstance(source, torch.Tensor):
            self._refuse("its loader computes new values from it")
        elif target.shape != source.shape:
            self._refuse(
                f"shape {list(source.shape)} is loaded into a place of shape {list(target.shape)}"
            )
        elif source.dtype not in (origin.dtype, target.dtype):
            self._refuse(f"its loader converts it to {source.dtype} on the way")
        else:
            self._record(target, source, origin)

    def _record(self, target: torch.Tensor, source: torch.Tensor, origin: _Origin) -> None:
        home = _home_of(target, self._homes[_storage(target)])
        if home is None or home.tensor.dtype != target.dtype:
            self._refuse("it is loaded into memory that is not a parameter")
            return
        place = _strides(target, int(home.tensor.storage_offset()))
        if not home.name.startswith(self.path):
            # What a draft has from its target, the target loads.
            self.shared.append((origin.name, home.name, place))
            return
        part = _strides(source, -origin.offset)
        cast = origin.dtype != target.dtype
        if cast:
            _check_cast(origin, target.dtype)
        self.slices.append(Slice(origin.name, home.name, part, place, cast))


def _check_cast(origin: _Origin, dtype: torch.dtype) -> None:
    """Refuse to convert, in a part of a layout too, what means something only with its scales."""
    scale = safetensors_dtype(origin.dtype) == "F8_E8M0" and dtype.itemsize > 1
    if scale or min(origin.dtype.itemsize, dtype.itemsize) > 1:
        return
    pushed, wanted = (safetensors_dtype(each) or str(each) for each in (origin.dtype, dtype))
    msg = (
        f"tensor {origin.name} is {pushed} where the model holds {wanted}, which would be a "
        f"quantisation and not a conversion; push it as {wanted}, with its scales where it has "
        "some"
    )
    raise PlanRefusedError(msg, [origin.name])


def _home_of(target: torch.Tensor, homes: list[_Home]) -> _Home | None:
    for home in homes:
        first = home.tensor.storage_offset()
        if first <= target.storage_offset() <= first + max(home.tensor.numel() - 1, 0):
            return home
    return None


class _Identity:
    """Puts a model back as it was, whatever its loaders did to it and however they ended.

    Attributes of modules count too: graphs may read a bare tensor.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
        self._tables = [
            (table, dict(table)) for module in model.modules() for table in _tables(module)
        ]
        self._data = [
            (tensor, tensor.data)
            for _, before in self._tables
            for tensor in before.values()
            if isinstance(tensor, torch.Tensor)
        ]

    def restore(self) -> bool:
        """Returns whether modules, parameters, buffers or their memory had changed."""
        for attributes, before in self._attributes:
            _put_back(attributes, before)
        # Each of them, not only up to the first one that was changed.
        changed = sum([_put_back(table, before) for table, before in self._tables])
        for tensor, data in self._data:
            if tensor.data.is_meta or tensor.data.data_ptr() != data.data_ptr():
                tensor.data = data
                changed += 1
        return changed > 0


def _put_back(table: dict[str, Any], before: dict[str, Any]) -> bool:
    """Give a dictionary its former items in their order; returns whether it had others."""
    same = table.keys() == before.keys() and all(table[key] is before[key] for key in before)
    if not same:
        table.clear()
        table.update(before)
    return not same


def _tables(module: torch.nn.Module) -> list[dict[str, Any]]:
    return [module._parameters, module._buffers, module._modules]  # noqa: SLF001


def _drive(model: Any, recorder: _Recorder, layout: Layout, *, draft: bool) -> None:
    try:
        with as_created(model), torch.no_grad(), recorder:
            for part in parts_of(model)[: None if draft else 1]:
                recorder.path = part.names.path
                loaders: Any = part.module
                loaders.load_weights(recorder.feed(layout, part))
            recorder.finish()
    except (PlanRefusedError, MemoryError, OSError, torch.OutOfMemoryError):
        # What the host or the device lacks now says nothing of the tensors.
        raise
    except Exception as error:
        raise PlanRefusedError(_refusal(recorder.current, error), [recorder.current]) from error


def _refusal(name: str, error: Exception) -> str:
    refused = f"the model's loader refused tensor {name}"
    if _COMPILED in name.split("."):
        return (
            f"{refused}: torch.compile put {_COMPILED} into its name; push "
            f"model.{_COMPILED}.state_dict(), or take {_COMPILED} out of the names"
        )
    # vLLM goes on with all that the model has.
    line = next(iter(str(error).strip().splitlines()), "")
    text = textwrap.shorten(line, _MAX_TEXT, placeholder=" ...")
    about = f"{type(error).__name__}: {text}".removesuffix(": ")
    return f"{refused} ({about}); push the names and shapes of the engine's checkpoint"


def capture_plan(
    model: Any,
    live: LiveParameters,
    layout: Layout,
    digests: Digests | None = None,
    *,
    draft: bool = True,
) -> tuple[LoadPlan, float]:
    """Return the plan for a layout and the seconds it took. The model is as before, proved.

    Nothing may run in the model meanwhile. `digests` is for parameters and buffers; None: `live`
    does it. `draft` says whether the version brings one. PlanRefusedError names tensors that the
    loaders refused or do more with than copy.
    """
    begin = time.perf_counter()
    recorder = _recorded(model, live, layout, digests, draft=draft)
    if recorder.refused:
        name, why = next(iter(recorder.refused.items()))
        msg = f"tensor {name} cannot be copied into place: {why}; this model is not supported"
        raise PlanRefusedError(msg, list(recorder.refused))
    plan = _plan_of(recorder, live, layout)
    return replace(plan, draft=draft_params(model, plan.written)), time.perf_counter() - begin


def unplaced(
    model: Any,
    live: LiveParameters,
    layout: Layout,
    digests: Digests | None = None,
    rest: tuple[TensorEntry, ...] = (),
) -> list[str]:
    """Return the names of those of some tensors that the model's loaders do nothing with.

    If loaders refuse these alone, they are shown `rest` as well: some refuse a tied head without
    its embedding.
    """
    try:
        recorder = _recorded(model, live, layout, digests)
    except PlanRefusedError:
        if not rest:
            raise
        both = Layout(layout.shards, (*rest, *layout.tensors))
        recorder = _recorded(model, live, both, digests)
    return [tensor.name for tensor in layout.tensors if tensor.name not in recorder.used]


def _recorded(
    model: Any,
    live: LiveParameters,
    layout: Layout,
    digests: Digests | None,
    *,
    draft: bool = True,
) -> _Recorder:
    digest_all = digests or live.digests
    before = digest_all()
    identity = _Identity(model)
    recorder = _Recorder(live)
    try:
        _drive(model, recorder, layout, draft=draft)
    finally:
        replaced = identity.restore()
        changed = [name for name, digest in digest_all().items() if before.get(name) != digest]
    if changed:
        raise PlanRefusedError("capturing the load plan changed parameters; restart vLLM", changed)
    if replaced:
        msg = "the model's loaders replace parameters instead of writing; not supported"
        raise PlanRefusedError(msg)
    return recorder


def _plan_of(recorder: _Recorder, live: LiveParameters, layout: Layout) -> LoadPlan:
    tensors = {t.name: (t.dtype, t.shape) for t in layout.tensors}
    slices, repeats = without_repeats(recorder.slices, tensors)
    params = {item.param: live.tensor(item.param) for item in slices}
    check_overlap(slices, {name: tensor.numel() for name, tensor in params.items()})
    return LoadPlan(
        signature=layout.signature,
        tensors=tensors,
        slices=tuple(slices),
        shared=_shared(recorder),
        repeats=repeats,
        param_dtypes={name: safetensors_dtype(tensor.dtype) for name, tensor in params.items()},
    )


def _shared(recorder: _Recorder) -> dict[str, str]:
    """Return by name the tensors of a draft that must be as another one, which is its target's."""
    targets = {(item.param, item.target): item.tensor for item in recorder.slices}
    found = ((name, targets.get((param, place), "")) for name, param, place in recorder.shared)
    return {name: other for name, other in found if name != other}
