"""The twin: a second load of the model, beside generation, that is exchanged with the live one."""

from __future__ import annotations
