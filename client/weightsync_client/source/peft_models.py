"""Models with PEFT adapters: merged while they are pushed, as they were before afterwards."""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.errors import Reason
from weightsync_client.errors import invalid, refuse
from weightsync_client.source.flat_parameters import joined
from weightsync_client.source.modules import (
    check_plain,
    module_tensors,
    plain_name,
    unwrapped,
)
from weightsync_client.source.tensors import settle

if TYPE_CHECKING:
    import torch


_TUNERS, _WRAPPERS = "peft.tuners.tuners_utils", "peft.utils.other"
_MODELS, _MIXED = "peft.peft_model", "peft.mixed_model"
#: Layers of models that are being pushed; `_LOCK` is taken to look and to change.
_IN_PUSH: weakref.WeakSet[Any] = weakref.WeakSet()
_LOCK = threading.Lock()


def has_adapters(module: torch.nn.Module) -> bool:
    return _TUNERS in sys.modules and any(_stand_in(m) for m in module.modules())


def merged_tensors(
    module: torch.nn.Module,
) -> tuple[Mapping[str, torch.Tensor], Callable[[], None]]:
    """Return the tensors of a model with its adapters merged, under the names of the base model.

    They are what the model computes with: of every layer the active adapters, or those that the
    caller has merged himself, which stay merged; of `modules_to_save` the active one. Until the
    second of what is returned was called, the model must be neither trained nor changed. After that
    call, which may be repeated, every parameter lies where it lay, with the same bits.

    The merging is done in a copy of the layers that it changes, on their device: with adapters on
    all linear layers that is nearly the memory of the model.

    Raises:
        InvalidError: Its adapters cannot be merged, or not into what a checkpoint of it can hold.
        ExhaustedError: There is no memory for it.
    """
    check_plain(module)
    model = unwrapped(module)
    _check_kinds(model)
    merged = MergedAdapters(model)
    try:
        base = _base(model)
        tensors = module_tensors(base, state=_base_state(model))
        _check_ties(base, tensors)
    except BaseException:
        merged.restore()
        raise
    return tensors, merged.restore


class _Saved(NamedTuple):
    owner: Any
    name: str
    parameter: Any
    data: Any


class MergedAdapters:
    """A model's adapters, merged until `restore`; nothing is merged if this raises.

    Only one of these may merge a model at a time. Layers merged before are left as they are.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._lock = threading.Lock()
        self._saved: list[_Saved] = []
        self._merged: list[Any] = []
        self._claimed = _claimed(_layers(model))
        try:
            _check_layers(model)
            for layer in self._claimed:
                if not layer.merged:
                    self._merged.append(layer)
                    self._merge(layer)
        except BaseException:
            self.restore()
            raise

    def _merge(self, layer: Any) -> None:
        import torch

        begin = len(self._saved)
        dtypes = _dtypes(layer)
        try:
            with torch.no_grad():
                self._set_copies(layer.get_base_layer())
                layer.merge()
        except torch.cuda.OutOfMemoryError as error:
            raise refuse(
                Reason.MEMORY_EXHAUSTED,
                "there is no memory for a second copy of the layers that have adapters; free some, "
                "or merge them into a copy on the host (merge_and_unload) and push that",
            ) from error
        except (NotImplementedError, RuntimeError, ValueError) as error:
            raise _refused(
                f"has adapters that PEFT cannot merge ({type(error).__name__}: {error}); push "
                "your own state dict"
            ) from error
        if not layer.merged:
            # None of its adapters is active.
            self._put_back(begin)
        if _dtypes(layer) != dtypes:
            raise _refused(
                "has adapters whose weights PEFT merges into weights of another dtype; cast them "
                f"to {', '.join(sorted(str(dtype) for dtype in set(dtypes.values())))}"
            )

    def _set_copies(self, owner: Any) -> None:
        # A layer may have adapters in adapters, and still needs one copy.
        known = {id(saved.parameter) for saved in self._saved}
        for name, parameter in owner.named_parameters(recurse=False):
            if id(parameter) not in known:
                self._saved.append(_Saved(owner, name, parameter, parameter.data))
                # Not the copy is put away but the original: to give that back cannot fail, and
                # whatever else looks at its memory finds there what it always did.
                parameter.data = parameter.data.clone()

    def restore(self) -> None:
        """Have everything as it was; any thread may call it, and again."""
        with self._lock:
            try:
                self._unmerge()
            finally:
                self._put_back(0)
                _disclaim(self._claimed)
                self._claimed = []

    def _unmerge(self) -> None:
        merged, self._merged = self._merged, []
        try:
            for layer in reversed(merged):
                # It subtracts, which rounds, but what it subtracts from is given up; some kinds of
                # layers have more to put back than weights.
                if layer.merged:
                    layer.unmerge()
            # The copies go: nothing that this thread has queued may write to them any more.
            for device in {saved.data.device for saved in self._saved}:
                settle(device)
        finally:
            for layer in merged:
                layer.merged_adapters = []

    def _put_back(self, begin: int) -> None:
        while len(self._saved) > begin:
            owner, name, parameter, data = self._saved.pop()
            parameter.data = data
            # Some kinds of layers replace the parameter.
            owner._parameters[name] = parameter  # noqa: SLF001 - as PyTorch does it


def _dtypes(layer: Any) -> dict[str, torch.dtype]:
    return {n: p.dtype for n, p in layer.get_base_layer().named_parameters(recurse=False)}


def _claimed(layers: list[Any]) -> list[Any]:
    """Return the layers, which no other push may merge before they are put back."""
    with _LOCK:
        if any(layer in _IN_PUSH for layer in layers):
            raise _refused(
                "has adapters and is being pushed already; wait until that push is over, or its "
                "source_free is done"
            )
        _IN_PUSH.update(layers)
    return layers


def _disclaim(layers: list[Any]) -> None:
    with _LOCK:
        _IN_PUSH.difference_update(layers)


# What stands where.


def _classes(module: str, *names: str) -> tuple[type[Any], ...]:
    """Return those of PEFT's classes that its release has and that are loaded."""
    loaded = sys.modules.get(module)
    found = (getattr(loaded, name, None) for name in names)
    return tuple(kind for kind in found if kind is not None)


def _stand_in(module: Any) -> str:
    """Return where below a module of PEFT's that one is which it wraps; empty: it is not PEFT's."""
    if isinstance(module, _models()):
        return "base_model"
    if isinstance(module, _classes(_TUNERS, "BaseTuner")):
        return "model"
    if isinstance(module, _classes(_WRAPPERS, "TrainableTokensWrapper")):
        return "token_adapter"
    if isinstance(module, _classes(_WRAPPERS, "ModulesToSaveWrapper")):
        active = module.active_adapter
        name = active if isinstance(active, str) else next(iter(active), "")
        return f"modules_to_save.{name}" if name in module.modules_to_save else "original_module"
    return "base_layer" if isinstance(module, _classes(_TUNERS, "BaseTunerLayer")) else ""


def _models() -> tuple[type[Any], ...]:
    return _classes(_MODELS, "PeftModel") + _classes(_MIXED, "PeftMixedModel")


def _layers(model: torch.nn.Module) -> list[Any]:
    """Return the layers with adapters that are in use: none of a part that another stands for."""
    kinds = _classes(_TUNERS, "BaseTunerLayer")
    found = {path for path, _ in _walk(model)}
    return [m for path, m in model.named_modules() if isinstance(m, kinds) and path in found]


def _base(model: Any) -> Any:
    while inner := _stand_in(model):
        model = model.get_submodule(inner)
    return model


def _walk(module: Any, path: str = "", name: str = "") -> Iterator[tuple[str, str | None]]:
    """Yield the path of every module in use, and its name in the base model; None: no name."""
    while inner := _stand_in(module):
        yield path, None
        path, module = joined(path, inner), module.get_submodule(inner)
    yield path, name
    for key, child in module._modules.items():  # noqa: SLF001 - named_children tells no module twice
        if child is not None:
            yield from _walk(child, joined(path, key), joined(name, key))


def _base_state(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of a model's state dict that its base model has, by their names there."""
    # Hooks of some wrappers take these out of the names of a state dict, and not of the paths.
    names = {plain_name(path): name for path, name in _walk(model)}
    parts = {plain_name(path) for path, _ in model.named_modules(remove_duplicate=False)}
    for key, tensor in model.state_dict().items():
        owner, _, leaf = plain_name(key).rpartition(".")
        if owner not in parts:
            raise _refused(
                f"has the tensor {key!r} in its state dict, which belongs to none of its modules; "
                "push your own state dict"
            )
        if (name := names.get(owner)) is not None:
            yield joined(name, leaf), tensor


# What cannot be pushed.


def _refused(problem: str) -> Exception:
    return invalid(f"the module {problem}")


def _check_kinds(model: torch.nn.Module) -> None:
    parts: Iterable[Any] = model.modules()
    for part in parts:
        if not isinstance(part, _models()):
            continue
        configs = list(part.peft_config.values())
        if any(getattr(config, "is_prompt_learning", False) for config in configs):
            raise _refused(
                "has prompt tuning, which adds inputs and changes no weight; train a LoRA "
                "adapter instead"
            )
        kinds = {str(getattr(config.peft_type, "value", config.peft_type)) for config in configs}
        tuner = isinstance(part.base_model, _classes(_TUNERS, "BaseTuner"))
        # Those of X-LoRA are mixed anew for every input.
        if not tuner or "XLORA" in kinds:
            raise _refused(
                f"has adapters of the kind {', '.join(sorted(kinds))}, which cannot be merged "
                "into weights; train a LoRA adapter instead"
            )


def _check_layers(model: torch.nn.Module) -> None:
    names: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = names.get(id(parameter), 0) + 1
    kinds = _classes(_TUNERS, "BaseTunerLayer") + _classes(_WRAPPERS, "ModulesToSaveWrapper")
    if any(getattr(m, "disable_adapters", False) for m in model.modules() if isinstance(m, kinds)):
        raise _refused(
            "has adapters that are disabled; enable them, or push a state dict of the base model"
        )
    for layer in _layers(model):
        problem = _problem(layer, names)
        if problem:
            raise _refused(problem)


def _problem(layer: Any, names: Mapping[int, int]) -> str:
    import torch

    base = layer.get_base_layer()
    if isinstance(base, torch.nn.MultiheadAttention):
        return (
            "has an adapter on a MultiheadAttention, whose weights PEFT replaces; merge it into a "
            "copy (merge_and_unload) and push that"
        )
    parameters = list(base.parameters(recurse=False))
    if any(hasattr(parameter, "full_tensor") for parameter in parameters):
        return (
            "has adapters on weights that are sharded over ranks; merge them into a full copy "
            "(merge_and_unload) and push that"
        )
    if any(parameter.device.type == "meta" for parameter in parameters):
        return "has adapters on weights that are offloaded; load the model whole before the push"
    if hasattr(base, "qweight") or not all(map(_is_plain, parameters)):
        return (
            "has adapters on quantised weights, into which they cannot be merged exactly; load the "
            "base model in the dtype of its checkpoint, merge the adapters there "
            "(merge_and_unload) and push that"
        )
    # Of trainable tokens both ends of a tie take the same rows.
    if not hasattr(layer, "token_indices") and any(names[id(p)] > 1 for p in parameters):
        return (
            "has an adapter on a tied weight, which merging would change at its other end too; "
            "leave it out of target_modules, or untie the weights before training"
        )
    return ""


def _check_ties(base: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    tied = getattr(base, "all_tied_weights_keys", None) or {}
    for target, source in tied.items():
        # Of two that are still one, the first was left out.
        if target in tensors and source in tensors:
            raise _refused(
                f"has trained {target!r} and {source!r} separately, but its checkpoint stores "
                "them as one tensor; train neither, or untie them before training"
            )


def _is_plain(parameter: Any) -> bool:
    import torch

    kinds = torch.nn.Parameter, torch.Tensor
    whole = parameter.is_floating_point() and parameter.element_size() >= 2
    return whole and type(parameter) in kinds and type(parameter.data) is torch.Tensor
