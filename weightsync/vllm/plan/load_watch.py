"""What the loading of a model made: the tensors that may depend on the weights that were loaded.

A version is written through the load plan, so that every tensor which the forward pass reads must
lie in a parameter that the plan covers, or not depend on the weights at all. vLLM makes some of
them out of weights when it loads: MLA's absorbed matrices, packed copies, converted scales. After a
write those would stay what the old weights made of them, and no comparison of parameters would
notice.

A tensor is taken for independent if it was there before any weight was loaded and has the same
bytes after it: rotary caches, default scales, masks, maps of experts. What appears when loading has
ended is made by forward passes for requests (key-value caches, workspaces), and goes with them. All
others that lie in no covered parameter are refused by name. No list of architectures is needed, and
what is not understood is refused.

The same bytes are no proof: a scale of 1.0 that a checkpoint brings is what a scale is without one.
So a tensor of the checkpoint that loading read must be covered too, and a number in Python that
loading changed, or has from what it had loaded, is in the way of a plan like a tensor.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import math
import weakref
from bisect import bisect_right
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightsync.vllm.plan.forward_tensors import forward_tensors, reach
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.loader_params import note_parameters
from weightsync.vllm.plan.model_parts import parts_of
from weightsync.vllm.plan.read_watch import ReadWatch, StorageSet, values_read

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from weightsync.vllm.plan.load_plan import LoadPlan

__all__ = [
    "LoadCall",
    "check_complete",
    "check_read",
    "is_watching",
    "load_call",
    "loaded_numbers",
    "made_by_loading",
    "small_floats",
    "unwatched",
    "watch_loading",
]

logger = logging.getLogger(__name__)

#: Larger parameters are not digested before they are loaded: what is in them then is chance.
_MOST_BYTES = 1 << 20
_RESTART = "restart vLLM to change the weights of this model"
#: Elements of a tensor that may be a scale, of one head each.
_SCALES = 1 << 10


class _Content(NamedTuple):
    """What a tensor is, wherever it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes


@dataclass(eq=False)
class _Loading:
    """A model that is being loaded.

    Attributes:
        before: The contents that there were before weights were loaded, by path and by address.
        numbers: The numbers that there were then, by path.
        storages: The memory that there was then.
        watch: What is read and written; it has seen nothing until `given`.
        given: Whether the model's loaders were given tensors.
        inside: Whether they are at work: which of their tensors they read is noted, and a capture
            sees what they do with a value.
        values: What Python was told of tensors that were not there before, or were loaded.
        some: Whether it was told of any.
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
        """Note that the values of a tensor are handed to Python."""
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
    """What became of a model when it was loaded.

    Attributes:
        made: Paths of the tensors that its loading made or changed.
        small: Paths of others that may hold scales which were the same before.
        numbers: Paths of all numbers that there were then.
        computed: Paths of those that loading changed, or had from what it had loaded.
        read: Names of the tensors that its loaders read; None: they were given none.
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
    """Return how the load of a model was asked for; None: nobody watched it."""
    return _calls.get(model)


def made_by_loading(model: torch.nn.Module) -> frozenset[str] | None:
    """Return the paths of the tensors that loading made or changed; None: nobody watched it."""
    return _paths_of(model, lambda loaded: loaded.made)


def small_floats(model: torch.nn.Module) -> frozenset[str] | None:
    """Return the paths of the tensors that may hold scales which loading set to what they were.

    None: nobody watched it.
    """
    return _paths_of(model, lambda loaded: loaded.small)


def loaded_numbers(model: torch.nn.Module) -> frozenset[str] | None:
    """Return the paths of the numbers that there were when loading ended; None: nobody watched it.

    Those that came later were made by kernels when they ran first.
    """
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

    Returns the plan, with what is known to be unread.

    Args:
        model: As it was loaded. Where its loaders were given no tensors, nobody knows what was
            read: what the plan ignores stays as it is in that checkpoint then.
        plan: Of that checkpoint.

    Raises:
        PlanRefusedError: With the names of those tensors.
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
            f"vLLM read {left[0]} when it loaded the checkpoint, and an update in place would "
            "leave what it made of that as it is"
        )
        raise PlanRefusedError(msg, left, _RESTART)
    computed = sorted(_paths_of(model, lambda loaded: loaded.computed) or ())
    if computed:
        msg = (
            f"vLLM took the number {computed[0]} from the weights when it loaded them, and an "
            "update in place would leave it as it is"
        )
        raise PlanRefusedError(msg, computed, _RESTART)
    known = all(loaded is not None and loaded.read is not None for _, loaded in seen)
    return replace(plan, unread=frozenset(plan.ignored) - read) if known else plan


def check_complete(model: torch.nn.Module, covered: Iterable[torch.Tensor]) -> None:
    """Refuse a model that reads what an update of its covered parameters leaves as it was.

    Args:
        model: As it was loaded. Where nobody watched that, every tensor counts as made by it.
        covered: The parameters that the load plan writes.

    Raises:
        PlanRefusedError: With the paths of those tensors.
    """
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
            f"nobody saw whether vLLM made {left[0]} from the weights when it loaded them; start "
            "vLLM with VLLM_PLUGINS=weightsync and --load-format auto"
        )
        raise PlanRefusedError(msg, left)
    if left:
        msg = (
            f"vLLM made {left[0]} from the weights when it loaded them, and an update in place "
            "would leave it as it is"
        )
        raise PlanRefusedError(msg, left, _RESTART)


def watch_loading(loaders: Any) -> None:
    """See to it that what loading makes of each model is known. Repeating it is harmless.

    Args:
        loaders: vLLM's module `model_executor.model_loader.base_loader`.
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
        logger.exception("what loading makes of the model could not be seen")


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
    """Watch the one load that comes now, by whoever brings the tensors."""
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
            logger.exception("what loading reads of the model could not be seen")
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
    """Return the addresses of a tensor's first byte and behind its last one."""
    begin = _address(tensor)
    steps = zip(tensor.shape, tensor.stride(), strict=True) if begin else ()
    last = sum((length - 1) * step for length, step in steps)
    return begin, begin + (last + 1) * tensor.element_size()


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same memory as ranges that lie apart, in order."""
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
