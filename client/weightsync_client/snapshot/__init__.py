"""What a client needs to send what changed: the last version's bytes, and shards of the difference.

A trainer rank that owns pieces of tensors fits in later: a held tensor is compared and advanced by
itself, so its bytes may as well be those of a piece, under the name and range of that piece.

NumPy and the codec are imported when the first push needs them.
"""

from __future__ import annotations
