"""What a forked child, such as a data loader, must not keep of its parent's shared memory.

With its descriptors and mappings it would stay a writer, and keep connections open.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import Protocol


class ParentOnly(Protocol):
    """Has descriptors that a child which is forked must not keep."""

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
