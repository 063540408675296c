"""What the loading of a model made: the tensors that may depend on the weights that were loaded.

Every tensor that the forward pass reads must lie in a parameter that the plan covers, or not depend
on the weights. vLLM makes some out of weights when it loads (MLA's absorbed matrices, packed
copies, converted scales); after a write they would stay as they were, and no comparison of
parameters would notice.

A tensor is taken for independent if it was there before any weight was loaded and has the same
bytes after it: rotary caches, default scales, masks. What appears after loading is made by forward
passes (key-value caches, workspaces). All others that lie in no covered parameter are refused by
name; no list of architectures is needed.

The same bytes are no proof: a scale of 1.0 that a checkpoint brings is what a scale is without one.
So a tensor of the checkpoint that loading read must be covered too, and a number in Python that
loading changed, or has from what it had loaded, is in the way of a plan like a tensor.

Parameters are moved to shared memory before anything keeps an address of them. Whatever shares
memory with one moves with it; what kernels have packed is a copy, which no plan covers, and such a
model is refused when somebody attaches.

One file: which tensors are watched follows from where a model can keep them.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
import logging
import math
import types
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from weightsync.shm.segments import Segment
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.live_params import note_parameters
from weightsync.vllm.plan.load_plan import LoadPlan, PlanRefusedError
from weightsync.vllm.plan.model_parts import parts_of
from weightsync.vllm.plan.read_watch import ReadWatch, StorageSet, values_read

logger = logging.getLogger(__name__)


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

    Followed are modules, attributes, slots, collections, and what functions close over, have as
    defaults or are bound to; not what is global to a Python module. Parameters and buffers have
    torch's names, and a tensor's shortest path comes first. No property of any object is evaluated.
    """
    for place, child, _, _ in _walk(model):
        if isinstance(child, torch.Tensor):
            yield place, child


class NumberPlace(NamedTuple):
    owner: Any
    name: str

    @property
    def writable(self) -> bool:
        return self.name in _attributes(self.owner)

    def read(self) -> float | None:
        found = _attributes(self.owner).get(self.name)
        return found if type(found) is float else None

    def write(self, number: float) -> None:
        _attributes(self.owner)[self.name] = number


@dataclass(frozen=True)
class Reached:
    """What one walk through a model finds: `tensors`, and by path every Python float.

    vLLM reads scales out of tensors when it loads, and hands them to kernels as numbers. What
    configurations hold is left out: it comes from no weight.
    """

    tensors: Sequence[tuple[str, torch.Tensor]]
    numbers: Mapping[str, float]
    places: Mapping[str, NumberPlace]


def reach(model: torch.nn.Module) -> Reached:
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


#: Larger parameters are not digested before they are loaded: what is in them then is chance.
_MOST_BYTES = 1 << 20
_RESTART = "restart vLLM to change the weights of this model"
#: Elements of a tensor that may be a scale, of one head each.
_SCALES = 1 << 10


class _Content(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes


@dataclass(eq=False)
class _Loading:
    """A model that is being loaded; `before`, `numbers` and `storages` are from before its weights.

    `given` says whether its loaders were given tensors, and `inside` whether they are at work:
    which tensors they read is noted then. `values` is what Python was told of tensors that were not
    there before, or were loaded, and `some` whether it was told of any.
    """

    before: Mapping[str | int, _Content]
    numbers: Mapping[str, float]
    storages: StorageSet
    watch: ReadWatch = field(default_factory=ReadWatch)
    given: bool = False
    inside: bool = False
    values: set[float] = field(default_factory=set)
    some: bool = False

    def note(self, tensor: torch.Tensor) -> None:
        if tensor.is_meta or tensor.layout is not torch.strided:
            return
        self.watch.note(tensor)
        if self.inside:
            return
        default = tensor in self.storages and tensor not in self.watch.written
        if tensor.is_floating_point() and not default:
            self.some = True
            if tensor.numel() <= _SCALES:
                self.values.update(tensor.detach().double().reshape(-1).tolist())


@dataclass(frozen=True)
class _Loaded:
    """What became of a model when it was loaded, by paths.

    `made` are tensors that loading made or changed, `small` others that may hold scales which were
    the same before. `computed` are those of all `numbers` that loading changed, or had from what it
    had loaded. `read` is None if its loaders were given no tensors.
    """

    made: frozenset[str]
    small: frozenset[str]
    numbers: frozenset[str]
    computed: frozenset[str]
    read: frozenset[str] | None


class LoadCall(NamedTuple):
    """What vLLM was asked to load: its VllmConfig and ModelConfig, and a prefix of layers."""

    config: Any
    model_config: Any
    prefix: str


_watching = True
#: Models that are being loaded.
_before: weakref.WeakKeyDictionary[torch.nn.Module, _Loading] = weakref.WeakKeyDictionary()
#: Models that were.
_made: weakref.WeakKeyDictionary[torch.nn.Module, _Loaded] = weakref.WeakKeyDictionary()
#: By model: how its load was asked for.
_calls: weakref.WeakKeyDictionary[torch.nn.Module, LoadCall] = weakref.WeakKeyDictionary()


def load_call(model: torch.nn.Module) -> LoadCall | None:
    return _calls.get(model)


def made_by_loading(model: torch.nn.Module) -> frozenset[str] | None:
    """Return the paths of the tensors that loading made or changed; None: nobody watched it."""
    return _paths_of(model, lambda loaded: loaded.made)


def small_floats(model: torch.nn.Module) -> frozenset[str] | None:
    """As `made_by_loading`, of tensors that may hold scales which loading set to what they were."""
    return _paths_of(model, lambda loaded: loaded.small)


def loaded_numbers(model: torch.nn.Module) -> frozenset[str] | None:
    """Return the paths of the numbers from before kernels ran; None: nobody watched the loading."""
    return _paths_of(model, lambda loaded: loaded.numbers)


def _paths_of(
    model: torch.nn.Module, some: Callable[[_Loaded], frozenset[str]]
) -> frozenset[str] | None:
    parts = parts_of(model)
    seen = [(part.names.path, _made.get(part.module)) for part in parts]
    if any(loaded is None for _, loaded in seen):
        return None
    found = {path + name for path, loaded in seen if loaded is not None for name in some(loaded)}
    if len(parts) > 1:
        # When both are loaded, vLLM puts modules of the target into the place of the draft's.
        reached = reach(model)
        found &= {*reached.numbers, *(path for path, _ in reached.tensors)}
    return frozenset(found)


def check_read(model: torch.nn.Module, plan: LoadPlan) -> LoadPlan:
    """Refuse a plan that brings nowhere what loading read of the model's own checkpoint.

    Returns the plan with what is known to be unread: nothing, if the loaders were given no tensors.
    """
    parts = parts_of(model)
    seen = [(part.names.tensors, _made.get(part.module)) for part in parts]
    # Of one without elements there is nothing to read.
    read = {
        names + name
        for names, loaded in seen
        for name in (loaded.read or () if loaded is not None else ())
        if math.prod(plan.tensors.get(names + name, ("", (0,)))[1])
    }
    # What repeats another one is compared with that in every version.
    left = sorted(read - plan.loaded - plan.shared.keys() - plan.repeats.keys())
    if left:
        msg = (
            f"vLLM read {left[0]} when it loaded the checkpoint, and an update in place would not "
            "change what it computed from it"
        )
        raise PlanRefusedError(msg, left, _RESTART)
    computed = sorted(_paths_of(model, lambda loaded: loaded.computed) or ())
    if computed:
        msg = (
            f"vLLM took the number {computed[0]} from the weights when it loaded them, and an "
            "update in place would not change it"
        )
        raise PlanRefusedError(msg, computed, _RESTART)
    known = all(loaded is not None and loaded.read is not None for _, loaded in seen)
    return replace(plan, unread=frozenset(plan.ignored) - read) if known else plan


def check_complete(model: torch.nn.Module, covered: Iterable[torch.Tensor]) -> None:
    """Refuse a model that reads what an update of its covered parameters leaves as it was."""
    made = made_by_loading(model)
    spans = _merged(map(_span, covered))
    left = [
        path
        for path, tensor in forward_tensors(model)
        if (made is None or path in made)
        and tensor.numel()
        and not tensor.is_meta
        and not _within(spans, tensor)
    ]
    if left and made is None:
        msg = (
            "start vLLM with VLLM_PLUGINS=weightsync and --load-format auto: the load was not "
            f"observed, so it is not known whether {left[0]} were computed from the weights"
        )
        raise PlanRefusedError(msg, left)
    if left:
        msg = (
            f"vLLM computed {left[0]} from the weights when it loaded them, and an update in "
            "place would not change it"
        )
        raise PlanRefusedError(msg, left, _RESTART)


def watch_loading(loaders: Any) -> None:
    """Note what the loading of each model makes; repeating it is harmless.

    `loaders` is vLLM's module `base_loader`.
    """
    initialize, load = loaders.initialize_model, loaders.BaseModelLoader.load_model
    if hasattr(initialize, "_weightsync"):
        return

    @functools.wraps(initialize)
    def initialize_model(*args: Any, **kwargs: Any) -> Any:
        model = initialize(*args, **kwargs)
        _note(_look_before, model)
        _note(note_parameters, model)
        _note(_watch_reads, model)
        return model

    form = inspect.signature(load)

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        with values_read(_note_value) if _watching else contextlib.nullcontext():
            model = load(*args, **kwargs)
        asked = form.bind(*args, **kwargs).arguments
        _calls[model] = LoadCall(
            asked.get("vllm_config"), asked.get("model_config"), asked.get("prefix", "")
        )
        _note(_look_after, model)
        return model

    initialize_model._weightsync = True  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    loaders.initialize_model = initialize_model
    loaders.BaseModelLoader.load_model = load_model


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Look at no load of the body: whoever loads a model again knows what to look at."""
    global _watching  # noqa: PLW0603 - one switch for what is patched once
    _watching = False
    try:
        yield
    finally:
        _watching = True


def is_watching() -> bool:
    """Whether what is loaded now is a model that this process serves."""
    return _watching


def _note(look: Any, model: torch.nn.Module) -> None:
    if not _watching:
        return
    try:
        look(model)
    except Exception:
        # vLLM goes on with what it does; without a record the model is refused by name.
        logger.exception("could not observe what loading changes in the model")


def _look_before(model: torch.nn.Module) -> None:
    contents: dict[str | int, _Content] = {}
    reached = reach(model)
    for path, tensor in reached.tensors:
        content = _content(tensor)
        if content is not None:
            contents[path] = contents[tensor.data_ptr()] = content
    there = StorageSet(tensor for _, tensor in reached.tensors if _address(tensor))
    _before[model] = _Loading(contents, reached.numbers, there)


def _watch_reads(model: Any) -> None:
    loading, load = _before[model], getattr(model, "load_weights", None)
    if load is None:
        return

    @functools.wraps(load)
    def load_weights(weights: Iterable[tuple[str, torch.Tensor]], *args: Any, **rest: Any) -> Any:
        loading.given = loading.inside = True
        try:
            with loading.watch:
                return load(loading.watch.hand_out(weights), *args, **rest)
        finally:
            loading.inside = False

    model.load_weights = load_weights


def _note_value(tensor: torch.Tensor) -> None:
    # One model is loaded at a time; who reads of another one meanwhile only adds to what is known.
    for loading in list(_before.values()):
        try:
            loading.note(tensor)
        except Exception:
            # VLLM goes on with what it does.
            logger.exception("could not observe what loading reads from the model")
            loading.some = True


def _look_after(model: torch.nn.Module) -> None:
    vars(model).pop("load_weights", None)
    loading = _before.pop(model, None)
    if loading is None:
        return
    made, small, reached = set(), set(), reach(model)
    for path, tensor in reached.tensors:
        if not tensor.numel():
            # A place for what forward passes make: key-value caches.
            continue
        known = loading.before.get(path), loading.before.get(_address(tensor))
        if known == (None, None) or _content(tensor) not in known:
            made.add(path)
        elif _may_scale(tensor):
            small.add(path)
    _made[model] = _Loaded(
        made=frozenset(made),
        small=frozenset(small),
        numbers=frozenset(reached.numbers),
        computed=frozenset(_computed(loading, reached.numbers)),
        read=frozenset(loading.watch.read) if loading.given else None,
    )


def _may_scale(tensor: torch.Tensor) -> bool:
    small = tensor.is_floating_point() and tensor.numel() <= _SCALES
    return small and tensor.is_contiguous() and bool(_address(tensor))


def _computed(loading: _Loading, numbers: Mapping[str, float]) -> Iterator[str]:
    for path, number in numbers.items():
        before = loading.numbers.get(path)
        # By their bits: no NaN is equal to itself.
        changed = before is not None and before.hex() != number.hex()
        new = before is None and loading.some
        if changed or new or number in loading.values:
            yield path


def _content(tensor: torch.Tensor) -> _Content | None:
    """Return what a tensor is; None: nothing that could be compared."""
    chance = isinstance(tensor, torch.nn.Parameter) and tensor.nbytes > _MOST_BYTES
    if chance or not _address(tensor):
        return None
    return _Content(tensor.dtype, tuple(tensor.shape), tensor_digest_of(tensor.detach()))


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies; 0: nowhere, or not in one piece of memory."""
    there = tensor.layout is torch.strided and not tensor.is_meta
    return tensor.data_ptr() if there else 0


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = _address(tensor)
    steps = zip(tensor.shape, tensor.stride(), strict=True) if begin else ()
    last = sum((length - 1) * step for length, step in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _within(spans: list[tuple[int, int]], tensor: torch.Tensor) -> bool:
    begin, end = _span(tensor)
    index = bisect_right(spans, begin, key=lambda span: span[0]) - 1
    return bool(begin) and index >= 0 and end <= spans[index][1]


#: Where each storage begins, bytes: kernels read whole cache lines.
_ALIGNMENT = 64
#: One of each model that was loaded; they stay as long as the process.
_segments: list[Segment] = []


def shared_segments() -> tuple[Segment, ...]:
    """Return what parameters lie in; empty: nobody asked for it."""
    return tuple(_segments)


def share_loaded(loaders: Any) -> None:
    """Move the parameters of each loaded model; `loaders` and repeating as in `watch_loading`."""
    load = loaders.BaseModelLoader.load_model
    if hasattr(load, "_weightsync_shared"):
        return

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
        model = load(*args, **kwargs)
        if is_watching():
            move_parameters(model)
        return model

    load_model._weightsync_shared = True  # type: ignore[attr-defined]  # noqa: SLF001 - our mark
    loaders.BaseModelLoader.load_model = load_model


def move_parameters(model: torch.nn.Module) -> None:
    """Put the parameters and buffers of a model into one segment; what they hold stays."""
    groups = _by_storage(model)
    sizes = [-(-group[0].untyped_storage().nbytes() // _ALIGNMENT) * _ALIGNMENT for group in groups]
    if not groups:
        return
    segment = Segment.create(sum(sizes))
    at = 0
    for group, size in zip(groups, sizes, strict=True):
        _move(group, segment, at)
        at += size
    _segments.append(segment)
    logger.info("weightsync: %d bytes of parameters are in shared memory", at)


def _by_storage(model: torch.nn.Module) -> list[list[torch.Tensor]]:
    """Return the tensors in unmoved memory of parameters and buffers, by that memory."""
    owned = {_storage(tensor) for tensor in (*model.parameters(), *model.buffers())}
    moved = {0, *(place for place in owned if any(_has_address(s, place) for s in _segments))}
    groups: dict[int, list[torch.Tensor]] = {address: [] for address in owned - moved}
    for tensor in _distinct(tensor for _, tensor in forward_tensors(model)):
        if (address := _storage(tensor)) in groups:
            groups[address].append(tensor)
    return [group for group in groups.values() if group]


def _distinct(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    seen: set[int] = set()
    for tensor in tensors:
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield tensor


def _storage(tensor: torch.Tensor) -> int:
    """Return where the memory of a tensor begins; 0: it has none of this host."""
    there = tensor.layout is torch.strided and tensor.device.type == "cpu"
    return tensor.untyped_storage().data_ptr() if there else 0


def _has_address(segment: Segment, address: int) -> bool:
    return 0 <= address - segment.address < segment.capacity


def _move(group: Iterable[torch.Tensor], segment: Segment, at: int) -> None:
    first, *_ = tensors = list(group)
    old = first.untyped_storage()
    # A storage of its own: compilers ask whether inputs share one.
    place = torch.frombuffer(segment.view, dtype=torch.uint8, count=old.nbytes(), offset=at)
    place.copy_(torch.empty(0, dtype=torch.uint8).set_(old))
    for tensor in tensors:
        view = torch.empty(0, dtype=tensor.dtype)
        view.set_(place.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())
        tensor.data = view
