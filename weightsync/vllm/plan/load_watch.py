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
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import weakref
from bisect import bisect_right
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightsync.vllm.plan.forward_tensors import forward_tensors
from weightsync.vllm.plan.int_views import tensor_digest_of
from weightsync.vllm.plan.load_plan import PlanRefusedError
from weightsync.vllm.plan.loader_params import note_parameters
from weightsync.vllm.plan.model_parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = [
    "LoadCall",
    "check_complete",
    "is_watching",
    "load_call",
    "made_by_loading",
    "unwatched",
    "watch_loading",
]

logger = logging.getLogger(__name__)

#: Larger parameters are not digested before they are loaded: what is in them then is chance.
_MOST_BYTES = 1 << 20


class _Content(NamedTuple):
    """What a tensor is, wherever it lies."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    digest: bytes


class LoadCall(NamedTuple):
    """What vLLM was asked to load: its VllmConfig and ModelConfig, and a prefix of layers."""

    config: Any
    model_config: Any
    prefix: str


_watching = True
#: By model: the contents that there were before weights were loaded, by path and by address.
_before: weakref.WeakKeyDictionary[torch.nn.Module, dict[str | int, _Content]] = (
    weakref.WeakKeyDictionary()
)
#: By model: paths of the tensors that its loading made or changed.
_made: weakref.WeakKeyDictionary[torch.nn.Module, frozenset[str]] = weakref.WeakKeyDictionary()
#: By model: how its load was asked for.
_calls: weakref.WeakKeyDictionary[torch.nn.Module, LoadCall] = weakref.WeakKeyDictionary()


def load_call(model: torch.nn.Module) -> LoadCall | None:
    """Return how the load of a model was asked for; None: nobody watched it."""
    return _calls.get(model)


def made_by_loading(model: torch.nn.Module) -> frozenset[str] | None:
    """Return the paths of the tensors that loading made or changed; None: nobody watched it."""
    parts = parts_of(model)
    seen = [(part.names.path, _made.get(part.module)) for part in parts]
    made = {path + name for path, names in seen for name in names or ()}
    if len(parts) > 1:
        # When both are loaded, vLLM puts modules of the target into the place of the draft's.
        made &= {path for path, _ in forward_tensors(model)}
    return None if any(names is None for _, names in seen) else frozenset(made)


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
            "would leave it as it is; restart vLLM to change the weights of this model"
        )
        raise PlanRefusedError(msg, left)


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
        return model

    form = inspect.signature(load)

    @functools.wraps(load)
    def load_model(*args: Any, **kwargs: Any) -> Any:
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
    found: dict[str | int, _Content] = {}
    for path, tensor in forward_tensors(model):
        content = _content(tensor)
        if content is not None:
            found[path] = found[tensor.data_ptr()] = content
    _before[model] = found


def _look_after(model: torch.nn.Module) -> None:
    before = _before.pop(model, None)
    if before is None:
        return
    made = set()
    for path, tensor in forward_tensors(model):
        if not tensor.numel():
            # A place for what forward passes make: key-value caches.
            continue
        known = before.get(path), before.get(_address(tensor))
        if known == (None, None) or _content(tensor) not in known:
            made.add(path)
    _made[model] = frozenset(made)


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
