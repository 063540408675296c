"""What can be pushed: tensors, files, shards."""

from __future__ import annotations
