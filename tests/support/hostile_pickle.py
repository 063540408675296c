"""A pickle that leaves a trace if anybody reads it."""

from __future__ import annotations

import base64
import os
import pickle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["pickled_handles"]


class _Opened:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def pickled_handles(made: Path) -> dict[str, Any]:
    """Return an update info of vLLM's whose handles make a folder when they are unpickled."""
    text = base64.b64encode(pickle.dumps(_Opened(str(made)))).decode()
    return {"names": [], "dtype_names": [], "shapes": [], "ipc_handles_pickled": text}
