"""What a version is: its layout, its manifest and its digests."""

from __future__ import annotations
