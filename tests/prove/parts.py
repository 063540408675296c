"""What `make prove` and `make prove-gpu` run: what CI does not."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

__all__ = ["PARTS", "Part", "chosen"]

#: pytest's last line, with or without its frame.
_PYTEST = re.compile(r"^=*\s*(\d+ (?:passed|failed|skipped|error).* in [\d.]+s\b[^=]*?)\s*=*$")
_CAUGHT = re.compile(r"^(\d+ of \d+ caught)$")


@dataclass(frozen=True)
class Part:
    """One command and the line that it ends with.

    Attributes:
        name: Of the part; what comes before its first dash is its group.
        command: What a person types, and what is run.
        gpu: Whether it needs a host with GPUs.
        default: Whether it is run when no part is named.
    """

    name: str
    command: str
    gpu: bool = False
    default: bool = True

    @property
    def group(self) -> str:
        """Such as `soak`."""
        return self.name.partition("-")[0]

    def line(self, output: str) -> str:
        """Return the line of a run: pytest's, the planted bugs', or one of JSON.

        Raises:
            ValueError: The output has none.
        """
        lines = [found for text in output.splitlines() if (found := _told(text.strip()))]
        if not lines:
            raise ValueError(f"`{self.command}` printed no line to store")
        # pytest runs twice: modules beside each other, and those that must be alone.
        return "; ".join(lines) if _PYTEST.match(lines[-1]) else lines[-1]


def _told(text: str) -> str:
    for pattern in (_PYTEST, _CAUGHT):
        if match := pattern.match(text):
            return match[1]
    if text.startswith("{"):
        try:
            return text if isinstance(json.loads(text), dict) else ""
        except ValueError:
            return ""
    return ""


_BENCHMARKS = (
    "push",
    "sharded",
    "memory",
    "scale",
    "pullers",
    "staging",
    "apply",
    "gate",
    "control",
    "refusals",
    "delta",
    "train",
    "engines",
    "simulation",
    "fleet",
)
_GPU = (
    "limits",
    "pause",
    "peers",
    "nccl",
    "apply",
    "exact",
    "durable",
    "compiled",
    "apply2",
    "push",
    "colocated",
    "models",
    "moe30",
)

PARTS = (
    Part("battery", "make -s battery"),
    Part("planted", "make -s planted"),
    Part("fuzz", "make -s fuzz SECONDS=600 SEED=11"),
    Part("soak-1", "make -s soak MINUTES=20 SEED=1"),
    Part("soak-2", "make -s soak MINUTES=20 SEED=2"),
    Part("soak-fleet", "make -s soak MINUTES=20 SEED=1 FLEET=1"),
    Part("soak-vllm", "make -s soak MINUTES=20 SEED=3 VLLM=1"),
    *(Part(f"bench-{name}", f"make -s bench-{name}", default=False) for name in _BENCHMARKS),
    Part("gpu-tests", "make -s test-gpu", gpu=True),
    *(Part(f"gpu-{name}", f"make -s gpu-bench PART={name}", gpu=True) for name in _GPU),
)


def chosen(wanted: str, *, gpu: bool) -> list[Part]:
    """Return the parts to run.

    Args:
        wanted: A part or a group; empty: those that are run by default.
        gpu: Those for a host with GPUs, or the others.

    Raises:
        ValueError: There is none of that name; the message names all.
    """
    here = [part for part in PARTS if part.gpu == gpu]
    found = [
        part for part in here if (wanted in (part.name, part.group) if wanted else part.default)
    ]
    if not found:
        names = ", ".join(part.name for part in here)
        raise ValueError(f"no part is named {wanted}; there are {names}")
    return found
