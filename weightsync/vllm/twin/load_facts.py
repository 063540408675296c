"""What every load of a model has in common with the first one, whichever loader does it.

A loader compares its loads with each other. One that takes the place of another has nothing to
compare its first load with: its rank has.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from weightsync.vllm.plan.load_plan import PlanRefusedError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from weightsync.vllm.twin.model_state import ModelState

__all__ = ["LoadFacts", "check_numbers"]


@dataclass(frozen=True)
class LoadFacts:
    """What a load tells beside its form.

    Attributes:
        others: Digest of every tensor that is not exchanged, by path.
        unread: Names of the version's tensors of which no byte was read.
        same_as: Of those, which repeat which; see `LoadPlan`. Loaders that come later are told.
    """

    others: Mapping[str, str]
    unread: frozenset[str]
    same_as: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return it as `from_json` reads it."""
        facts = {"others": dict(self.others), "unread": sorted(self.unread)}
        return {**facts, "same_as": dict(self.same_as)}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> LoadFacts:
        """Read what `to_json` returned."""
        unread = frozenset(document["unread"])
        return cls(dict(document["others"]), unread, dict(document["same_as"]))

    def check(self, first: LoadFacts) -> None:
        """Refuse a load that is unlike the first one.

        Raises:
            PlanRefusedError: With the tensors that differ.
        """
        changed = {
            path
            for path in first.others.keys() | self.others.keys()
            if first.others.get(path) != self.others.get(path)
        }
        if changed:
            msg = "vLLM makes these tensors from the weights, and they are not exchanged"
            raise PlanRefusedError(msg, sorted(changed))
        lost = self.unread - first.unread
        if lost:
            msg = "vLLM loads nothing from these tensors of the version, as it did before"
            raise PlanRefusedError(msg, sorted(lost))


def check_numbers(numbers: Mapping[str, str], live: ModelState, fixed: str) -> None:
    """Refuse a version with other numbers where what runs would not notice them.

    Args:
        numbers: Of the version.
        live: What is live.
        fixed: See `TwinTransform`.
    """
    changed = [path for path, bits in numbers.items() if live.numbers.get(path) != bits]
    if not changed:
        return
    if not fixed and live.later:
        fixed = f"kernels have made {min(live.later)} when they ran first; restart vLLM to serve it"
    if fixed:
        msg = f"this version has other numbers than what is live, and {fixed}"
        raise PlanRefusedError(msg, changed)
