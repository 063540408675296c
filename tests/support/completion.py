"""What vLLM answered, equal to another answer up to how fp32 was rounded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

#: Log probabilities are equal within this: one computation may round otherwise than the one before
#: it, because of what runs beside it: up to 1e-4 with logits of 20. Contents of the tests differ in
#: more than twenty times as much.
ROUNDING = 5e-4


@dataclass(eq=False)
class Completion:
    """One choice of an answer, with log probabilities.

    Attributes:
        text: What was generated.
        tokens: Its token ids; none unless they were asked for.
        names: Its tokens, as vLLM writes them.
        logprobs: Log probability of each.
        top: Log probabilities of the likeliest tokens at each place, by name.
    """

    text: str
    tokens: list[int]
    names: list[str]
    logprobs: list[float]
    top: list[dict[str, float]]

    @classmethod
    def read(cls, answer: Mapping[str, Any]) -> Completion:
        """Read the only choice of a body of `/v1/completions`."""
        (choice,) = answer["choices"]
        found = choice["logprobs"]
        return cls(
            choice["text"],
            choice.get("token_ids") or [],
            found["tokens"],
            found["token_logprobs"],
            found["top_logprobs"],
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Completion):
            return NotImplemented
        mine, others = self._exact(), other._exact()
        if mine != others:
            return False
        return all(
            abs(one - another) <= ROUNDING
            for one, another in zip(self._rounded(), other._rounded(), strict=True)
        )

    __hash__ = None  # type: ignore[assignment]  # two that are equal need not be to a third

    def _exact(self) -> tuple[Any, ...]:
        return self.text, self.tokens, self.names, [sorted(place) for place in self.top]

    def _rounded(self) -> list[float]:
        return self.logprobs + [place[name] for place in self.top for name in sorted(place)]
