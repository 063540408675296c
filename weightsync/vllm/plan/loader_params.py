"""Parameters as vLLM's weight loaders know them, over the memory that the forward pass reads.

When loading has ended, vLLM replaces the parameters of experts and of quantised layers by plain
ones. The class that knows how to cut a tensor for this rank is gone then, and so are attributes
that loaders ask for, such as the kind of a scale. For a capture they are put back for a moment,
where what replaced them has the same form: what the loaders write then is what is live.
"""

from __future__ import annotations

import contextlib
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from weightsync.vllm.plan.model_parts import parts_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

__all__ = ["as_created", "note_parameters"]


@dataclass(frozen=True)
class _Created:
    """A parameter before anything was loaded.

    Attributes:
        tensor: It, as long as somebody has it.
        kind: Its class.
        attributes: What was set on it.
        form: Its shape and dtype.
    """

    tensor: weakref.ref[torch.Tensor]
    kind: type[torch.Tensor]
    attributes: Mapping[str, Any]
    form: tuple[torch.Size, torch.dtype]


@dataclass(frozen=True)
class _Substitute:
    """A parameter that stands for another one over the same memory."""

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

    A parameter that now has another shape or dtype stays as it is. What a loader replaces meanwhile
    stays replaced, for whoever looks at that.
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
