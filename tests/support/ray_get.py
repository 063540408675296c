"""What Ray's driver does with the futures of its actors."""

from __future__ import annotations

import pickle
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

__all__ = ["ray_get"]


def ray_get(futures: list[Future[Any]]) -> list[Any]:
    """Do as `ray.get` does: raise the first error there is, at once, and through a pickle."""
    done, _ = wait(futures, return_when=FIRST_EXCEPTION)
    for future in done:
        error = future.exception()
        if error is not None:
            raise pickle.loads(pickle.dumps(error))
    return [future.result() for future in futures]
