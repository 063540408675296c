"""What every test on a GPU tells: which kernels vLLM computed attention with."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.support.vllm_server import attention_backends

if TYPE_CHECKING:
    from collections.abc import Generator

#: Name of the property of a test.
_PROPERTY = "attention"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    """Note what the engines of a test compute with, before they may be stopped."""
    try:
        yield
    finally:
        if backends := attention_backends():
            item.user_properties.append((_PROPERTY, ", ".join(backends)))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Tell how many tests ran with which."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    calls = [report for report in reports if getattr(report, "when", "") == "call"]
    told = [dict(report.user_properties) for report in calls]
    counts = Counter(properties[_PROPERTY] for properties in told if _PROPERTY in properties)
    for backends, count in sorted(counts.items()):
        terminalreporter.write_line(f"attention by {backends}: {count} tests")
