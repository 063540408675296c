"""What a client needs to send changes: the last version's bytes, and shards of differences.

NumPy and the codec are imported when the first push needs them.
"""

from __future__ import annotations
