"""Groups of settings: frozen dataclasses, some of whose fields are set by flags and variables."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

#: Where the metadata of a field have its `FlatSetting`.
FLAT = "flat"


@dataclass(frozen=True)
class FlatSetting:
    """How a field is set from outside; an empty `name` is the field's own.

    `check` returns the value that a given one stands for, or raises ValueError with the remedy.
    `more` is what pydantic is told: default, description, bounds.
    """

    name: str
    check: Callable[[Any], Any] | None
    more: Mapping[str, Any]


def setting(
    default: Any,
    description: str,
    *,
    default_factory: Callable[[], Any] | None = None,
    name: str = "",
    check: Callable[[Any], Any] | None = None,
    **bounds: float,
) -> Any:
    given = {"default_factory": default_factory} if default_factory else {"default": default}
    flat = FlatSetting(name, check, {**given, "description": description, **bounds})
    made = default_factory or partial(copy.copy, default)
    return field(default_factory=made, metadata={FLAT: flat})
