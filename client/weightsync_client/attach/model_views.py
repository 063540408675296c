"""Puts views of live parameters into a model that was made on the meta device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from weightsync.errors import Reason
from weightsync_client.attach.fused_views import fused_view
from weightsync_client.errors import ClientError, refuse

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["put_into"]

#: Names in one refusal.
_SHOWN = 3


class _Place(NamedTuple):
    """Where a model keeps a tensor that has no memory yet."""

    module: torch.nn.Module
    table: dict[str, Any]
    key: str
    name: str
    tensor: torch.Tensor


def put_into(model: torch.nn.Module, live: Mapping[str, torch.Tensor]) -> None:
    """Replace every parameter and buffer on the meta device by the live one of its name.

    Buffers that no checkpoint has, as those of rotary embeddings, are computed by the model's own
    code where that is one of transformers.

    Args:
        model: Its names are those of the checkpoint; what it ties stays tied.
        live: Views, by name.

    Raises:
        ClientError: Naming what is not there; the model is as it was.
    """
    places = list(_on_meta(model))
    if not places:
        raise refuse(
            Reason.REQUEST_INVALID,
            "no tensor of the model is on the meta device; build it under `with "
            'torch.device("meta")`, so that it has no memory of its own',
        )
    found = _matched(model, places, live)
    device = next((view.device for view in found.values()), torch.device("cpu"))
    rest = [place for place in places if id(place.tensor) not in found]
    computed = _computed(model, rest, device)
    made: dict[int, torch.Tensor] = {}
    for place in places:
        key = id(place.tensor)
        if key in found and key not in made:
            made[key] = _alike(found[key], place.tensor)
        place.table[place.key] = made[key] if key in found else computed[place.name]


def _on_meta(model: torch.nn.Module) -> Iterator[_Place]:
    for prefix, module in model.named_modules():
        for table in (module._parameters, module._buffers):  # noqa: SLF001 - as torch's loaders do
            for key, tensor in table.items():
                if tensor is not None and tensor.is_meta:
                    name = f"{prefix}.{key}" if prefix else key
                    yield _Place(module, table, key, name, tensor)


def _alike(view: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    """Return a view as a parameter where what it replaces is one."""
    if not isinstance(old, torch.nn.Parameter):
        return view
    return torch.nn.Parameter(view, requires_grad=old.requires_grad)


def _matched(
    model: torch.nn.Module, places: Sequence[_Place], live: Mapping[str, torch.Tensor]
) -> dict[int, torch.Tensor]:
    """Return what replaces each tensor that a checkpoint has, by the identity of the tensor."""
    # A tied parameter has several names, of which the checkpoint may have one only.
    views = {place.name: _view(place, live) for place in places}
    found = {id(p.tensor): view for p in places if (view := views[p.name]) is not None}
    stored = model.state_dict(keep_vars=True).keys()
    lacking = [p.name for p in places if id(p.tensor) not in found and p.name in stored]
    if lacking:
        raise _refused(
            "the model has tensors that do not lie whole in one place of the engine's memory",
            lacking,
            "build it with the names of the engine's checkpoint, and with tensor parallelism use "
            "boxes",
        )
    known = [place for place in places if id(place.tensor) in found]
    other = [p.name for p in known if found[id(p.tensor)].shape != p.tensor.shape]
    if other:
        raise _refused(
            "the model has tensors of another shape than the engine's",
            other,
            "build it from the configuration that Attached.config has",
        )
    return found


def _view(place: _Place, live: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    if place.name in live:
        return live[place.name]
    return fused_view(place.name, place.tensor.shape, live)


def _computed(
    model: torch.nn.Module, rest: Sequence[_Place], device: torch.device
) -> dict[str, torch.Tensor]:
    """Return what the model computes of its buffers that no checkpoint has, by name."""
    made = {place.name: _poisoned(place.tensor, device) for place in rest}
    initialise = getattr(model, "_init_weights", None)
    try:
        for place in rest:
            place.table[place.key] = made[place.name]
        for module in {id(place.module): place.module for place in rest}.values():
            if callable(initialise) and not list(module.parameters(recurse=False)):
                initialise(module)
    finally:
        for place in rest:
            place.table[place.key] = place.tensor
    left = [name for name, tensor in made.items() if not _filled(tensor)]
    if left:
        raise _refused(
            "nothing tells what these buffers hold, which no checkpoint has",
            left,
            "make them outside of the meta device",
        )
    return made


def _poisoned(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    new = torch.empty_like(tensor, device=device)
    return new.fill_(float("nan")) if new.is_floating_point() else new


def _filled(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() and not bool(tensor.isnan().any())


def _refused(what: str, names: Sequence[str], remedy: str) -> ClientError:
    shown = ", ".join(names[:_SHOWN])
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return refuse(Reason.ENGINE_REFUSED, f"{what} ({shown}{more}); {remedy}")
