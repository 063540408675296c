"""A target and its draft as one model: a version is written into both, or into neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weightsync.vllm.draft import DRAFT

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = ["ModelPart", "ModelWithDraft", "draft_params", "parts_of"]


class ModelPart(NamedTuple):
    """A model that vLLM has loaded by itself.

    Attributes:
        module: It.
        path: What its paths begin with.
        names: What the names of its tensors begin with, as versions have them.
        foreign: What the names of another part's begin with; "": none do.
    """

    module: torch.nn.Module
    path: str
    names: str
    foreign: str

    def own_name(self, name: str) -> str | None:
        """Return a tensor's name as the loaders of this part know it; None: it is not for them."""
        if self.foreign and name.startswith(self.foreign):
            return None
        return name.removeprefix(self.names) if name.startswith(self.names) else None


class ModelWithDraft(torch.nn.Module):
    """A target and its draft. Paths of the target are as in itself, the draft's have a prefix.

    Where both use one module, such as the embedding, it goes by its path in the target.

    Args:
        target: What generates.
        draft: What guesses ahead.
        names: What the names of the draft's tensors begin with; "": they lie in the target's
            checkpoint.
    """

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module, names: str) -> None:
        super().__init__()
        # `add_module` wants a name; without one paths go on as if this module were not there.
        self._modules.update({"": target, DRAFT.rstrip("."): draft})
        self.parts = (ModelPart(target, "", "", names), ModelPart(draft, DRAFT, names, ""))


def parts_of(model: torch.nn.Module) -> tuple[ModelPart, ...]:
    """Return the parts of a model, the target first."""
    return model.parts if isinstance(model, ModelWithDraft) else (ModelPart(model, "", "", ""),)


def draft_params(model: torch.nn.Module, params: Collection[str]) -> frozenset[str]:
    """Return those of some parameters, by path, that only the draft has."""
    if not isinstance(model, ModelWithDraft):
        return frozenset()
    return frozenset(name for name in params if name.startswith(DRAFT))
