"""What a child that is forked, as a data loader is, must not keep of its parent's shared memory.

It would get all descriptors and mappings: it would stay a writer, and a connection would not end
with its parent.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol

__all__ = ["NO_FORK", "ParentOnly", "close_in_children"]


class ParentOnly(Protocol):
    """What has descriptors that only this process should have."""

    def leave_to_parent(self) -> None:
        """In a child that was forked: close them."""


_open: weakref.WeakSet[ParentOnly] = weakref.WeakSet()
#: Held, for moments only, from where something is there until it is known what a child must not
#: keep of it, and by who forks; who forks while holding it does not wait for itself.
NO_FORK = threading.RLock()


def close_in_children(holder: ParentOnly) -> None:
    """Have every child call `leave_to_parent`; NO_FORK is held from before there was anything."""
    _open.add(holder)


def _begin_child() -> None:
    try:
        for holder in list(_open):
            holder.leave_to_parent()
    finally:
        NO_FORK.release()


os.register_at_fork(
    before=NO_FORK.acquire, after_in_parent=NO_FORK.release, after_in_child=_begin_child
)
