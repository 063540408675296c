"""Settings of the tests of the core."""

from __future__ import annotations

from hypothesis import settings

# Other work on the machine must not fail a test; pytest's own timeout bounds each.
settings.register_profile("core")
settings.load_profile("core")
