"""The class that the operator has named, found as Python finds it."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["import_class"]


def import_class(named: str) -> Any:
    """Return the class of `module:Class`.

    Raises:
        TypeError: It is no class with setup and train.
        Exception: Its module cannot be imported.
    """
    module, _, name = named.partition(":")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type) or not all(hasattr(found, part) for part in ("setup", "train")):
        msg = f"{module} has no class {name} with setup and train"
        raise TypeError(msg)
    return found
