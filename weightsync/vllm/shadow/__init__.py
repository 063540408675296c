"""The shadow load: a second load of the model beside generation, exchanged with the live one."""

from __future__ import annotations
