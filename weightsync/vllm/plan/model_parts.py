"""A target and its draft as one model: a version is written into both, or into neither."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from weightsync.vllm.draft import DRAFT

if TYPE_CHECKING:
    from collections.abc import Collection

__all__ = [
    "ModelPart",
    "ModelWithDraft",
    "PartNames",
    "draft_params",
    "names_of_parts",
    "parts_of",
    "shared_modules",
]


class PartNames(NamedTuple):
    """How what belongs to a part is called in the whole.

    Attributes:
        path: What the paths of its modules begin with.
        tensors: What the names of its tensors begin with, as versions have them.
        foreign: What the names of another part's begin with; "": none do.
    """

    path: str = ""
    tensors: str = ""
    foreign: str = ""

    def own_name(self, name: str) -> str | None:
        """Return a tensor's name as the loaders of this part know it; None: it is not for them."""
        if self.foreign and name.startswith(self.foreign):
            return None
        return name.removeprefix(self.tensors) if name.startswith(self.tensors) else None


class ModelPart(NamedTuple):
    """A model that vLLM has loaded by itself, and how what belongs to it is called."""

    module: torch.nn.Module
    names: PartNames


def names_of_parts(draft: str | None) -> tuple[PartNames, ...]:
    """Return the names of a target and its draft.

    Args:
        draft: What the names of the draft's tensors begin with; "": they lie in the target's
            checkpoint; None: there is no draft.
    """
    if draft is None:
        return (PartNames(),)
    return PartNames(foreign=draft), PartNames(DRAFT, draft)


class ModelWithDraft(torch.nn.Module):
    """A target and its draft. Paths of the target are as in itself, the draft's have a prefix.

    Where both use one module, such as the embedding, it goes by its path in the target.

    Args:
        target: What generates.
        draft: What guesses ahead.
        tensors: What the names of the draft's tensors begin with; see `names_of_parts`.
    """

    def __init__(self, target: torch.nn.Module, draft: torch.nn.Module, tensors: str) -> None:
        super().__init__()
        # `add_module` wants a name; without one paths go on as if this module were not there.
        self._modules.update({"": target, DRAFT.rstrip("."): draft})
        both = zip((target, draft), names_of_parts(tensors), strict=True)
        self.parts = tuple(ModelPart(module, names) for module, names in both)


def parts_of(model: torch.nn.Module) -> tuple[ModelPart, ...]:
    """Return the parts of a model, the target first."""
    return model.parts if isinstance(model, ModelWithDraft) else (ModelPart(model, PartNames()),)


def shared_modules(model: torch.nn.Module) -> dict[str, str]:
    """Return the paths in a draft of the modules that are its target's, and their paths there."""
    if not isinstance(model, ModelWithDraft):
        return {}
    target, draft = (part.module for part in model.parts)
    known = {id(module): path for path, module in target.named_modules()}
    found: dict[str, str] = {}
    for path, module in draft.named_modules(remove_duplicate=False):
        within = any(path.startswith(f"{outer}.") for outer in found)
        if id(module) in known and not within:
            found[path] = known[id(module)]
    return found


def draft_params(model: torch.nn.Module, params: Collection[str]) -> frozenset[str]:
    """Return those of some parameters, by path, that only the draft has."""
    if not isinstance(model, ModelWithDraft):
        return frozenset()
    return frozenset(name for name in params if name.startswith(DRAFT))
