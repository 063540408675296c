"""A metric of a server that says in its log where it serves them."""

from __future__ import annotations

import re
import urllib.request

__all__ = ["scraped"]


def scraped(log: str, name: str, **labels: str) -> float:
    """Return a metric of the last life of a server, which was started with `--metrics`.

    Args:
        log: What it has printed.
        name: Of the metric.
        **labels: Some of its labels; of several children that have them, the first counts.
    """
    address = re.findall(r"metrics on (http://\S+)", log)[-1]
    with urllib.request.urlopen(address) as answer:
        text = answer.read().decode()
    children = re.findall(rf"^{name}{{([^}}]*)}} (\S+)$", text, re.MULTILINE)
    wanted = {f'{key}="{value}"' for key, value in labels.items()}
    return next(float(value) for given, value in children if wanted <= set(given.split(",")))
