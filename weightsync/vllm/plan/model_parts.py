"""A target and its draft as one model: a version is written into both, or into neither."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import torch

from weightsync.vllm.draft import DRAFT


class PartNames(NamedTuple):
    """Prefixes of a part's module paths, of its tensors in versions, and of another part's."""

    path: str = ""
    tensors: str = ""
    foreign: str = ""

    def own_name(self, name: str) -> str | None:
        """Return a tensor's name as the loaders of this part know it; None: it is not for them."""
        if self.foreign and name.startswith(self.foreign):
            return None
        return name.removeprefix(self.tensors) if name.startswith(self.tensors) else None


class ModelPart(NamedTuple):
    module: torch.nn.Module
    names: PartNames


def names_of_parts(draft: str | None) -> tuple[PartNames, ...]:
    """Return the names of a target and its draft; `draft` is as `draft_names` has it."""
    if draft is None:
        return (PartNames(),)
    return PartNames(foreign=draft), PartNames(DRAFT, draft)


class ModelWithDraft(torch.nn.Module):
    """A target and its draft, whose paths have a prefix; a shared module has the target's path."""

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
