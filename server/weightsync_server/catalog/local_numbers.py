"""Numbers of content that one host alone has: no origin gives them, and they say which content.

A follower's engine may start on a checkpoint that its origin does not have. Under a number of the
origin it would mean other bytes on another host, sooner or later.
"""

from __future__ import annotations

__all__ = ["FIRST_LOCAL", "LOCAL_BEFORE", "local_number"]

#: Half of all numbers: trainers do not come there one by one.
FIRST_LOCAL = 1 << 52
#: Subtracted from a local number, it stands below all others.
LOCAL_BEFORE = 1 << 53


def local_number(content_digest: str) -> int:
    """Return the number of content that has none elsewhere: the same wherever it is."""
    return FIRST_LOCAL + int(content_digest, 16) % FIRST_LOCAL
