"""What any server needs: metrics, files, deadlines; knows no word of weights."""

from __future__ import annotations
