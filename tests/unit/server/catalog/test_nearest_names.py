"""A refusal of unknown names tells which prefix is wrong, or the nearest name that is known."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

from weightsync.errors import Reason, WeightSyncError
from weightsync.model.manifest import TensorEntry
from weightsync_server.catalog.layout_compatibility import (
    add_suggestion,
    nearest_name,
    prefix_remedy,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from weightsync_server.catalog.layout_compatibility import LayoutCompatibility

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
_KNOWN = frozenset(
    {"lm_head.weight", "model.embed_tokens.weight", "model.norm.weight"}
    | {f"model.layers.{i}.self_attn.{p}.weight" for i in range(12) for p in _PROJECTIONS}
    | {f"model.layers.{i}.experts.{j}.up.weight" for i in range(12) for j in range(12)}
)
_NEAREST = "; the nearest name to '{}' that the engine knows is '{}'"


class _Accepted:
    def __init__(self, known: Iterable[str]) -> None:
        self._known = frozenset(known)

    async def names(self) -> frozenset[str]:
        return self._known


async def _suggested(
    names: Sequence[str], refused: Sequence[str] | None = None, known: Iterable[str] = _KNOWN
) -> str:
    """Return what a refusal of names says more than before."""
    facts = {"tensors": json.dumps(list(names if refused is None else refused))}
    error = WeightSyncError(Reason.ENGINE_REFUSED, "refused", metadata=facts)
    tensors = [
        TensorEntry(name, "U8", (1,), 0, index, index + 1) for index, name in enumerate(names)
    ]
    accepted: LayoutCompatibility = _Accepted(known)  # type: ignore[assignment]
    found = await add_suggestion(error, tensors, accepted)
    assert (found.reason, found.metadata) == (error.reason, facts)
    before, _, after = found.message.partition("refused")
    return before + after


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("layers.0.q.weight", "model.layers.0.self_attn.q_proj.weight"),
        ("model.layers.11.self_attn.q_porj.weight", "model.layers.11.self_attn.q_proj.weight"),
        ("layers.3.experts.10.up.weight", "model.layers.3.experts.10.up.weight"),
        ("lm_haed.weight", "lm_head.weight"),
        ("optimizer.state", ""),
        ("", ""),
    ],
)
def test_the_nearest_name(name: str, nearest: str) -> None:
    assert nearest_name(name, _KNOWN) == nearest
    assert nearest_name(name, sorted(_KNOWN)) == nearest
    assert nearest_name(name, sorted(_KNOWN, reverse=True)) == nearest


@pytest.mark.parametrize(
    ("unknown", "remedy"),
    [
        ([f"module.{n}" for n in _KNOWN], "remove the prefix 'module.' from the names"),
        ([f"a._orig_mod.{n}" for n in _KNOWN], "remove the prefix 'a._orig_mod.' from the names"),
        (["norm.weight", "embed_tokens.weight"], "add the prefix 'model.' to the names"),
        # Not for all of them.
        (["module.lm_head.weight", "other.lm_head.weight"], ""),
        (["norm.weight", "lm_haed.weight"], ""),
        # Any of several would do, so that nobody knows which is meant.
        (["self_attn.q_proj.weight"], ""),
        # A prefix is a whole part of a name.
        (["mylm_head.weight"], ""),
        ([], ""),
    ],
)
def test_one_prefix_for_all(unknown: list[str], remedy: str) -> None:
    assert prefix_remedy(unknown, _KNOWN) == remedy


async def test_a_prefix_is_told_instead_of_a_name() -> None:
    names = ["module.lm_head.weight", "module.model.norm.weight"]
    assert await _suggested(names) == "remove the prefix 'module.' from the names: "
    # What the engine knows already does not need another prefix.
    more = [*names, "lm_head.weight"]
    assert await _suggested(more, names) == "remove the prefix 'module.' from the names: "


_LEAVE = "leave out 'v_head.summary.weight', of a head that the engine's model has not"


async def test_a_head_that_trainers_add_is_to_be_left_out() -> None:
    head = "v_head.summary.weight"
    assert await _suggested([head]) == f"{_LEAVE}: "
    names = ["module.lm_head.weight", "module.model.norm.weight", head]
    remedy = "remove the prefix 'module.' from the names"
    assert await _suggested(names) == f"{remedy} and {_LEAVE}: "
    assert await _suggested(names, [head]) == f"{remedy} and {_LEAVE}: "
    wrapped = "module.v_head.summary.weight"
    leave = _LEAVE.replace("'v_head", "'module.v_head")
    assert await _suggested([*names[:2], wrapped]) == f"{remedy} and {leave}: "
    found = await _suggested([head, "v_head.summary.bias", "lm_haed.weight"])
    assert found.startswith("leave out 'v_head.summary.weight' and 1 more, of a head")
    assert found.endswith(_NEAREST.format("lm_haed.weight", "lm_head.weight"))
    # One that the engine has is none.
    assert await _suggested(["score.weight", "x"], known=["score.weight"]) == ""


async def test_the_first_unknown_name_is_the_one_that_is_compared() -> None:
    names = ["lm_head.weight", "layers.0.q.weight", "layers.0.k.weight"]
    nearest = "model.layers.0.self_attn.q_proj.weight"
    assert await _suggested(names) == _NEAREST.format("layers.0.q.weight", nearest)


@pytest.mark.parametrize(
    ("names", "refused", "known"),
    [
        # Its shape or dtype was refused.
        (["lm_head.weight", "lm_haed.weight"], ["lm_head.weight"], _KNOWN),
        # Parameters, which have other names.
        (["lm_haed.weight"], ["model.layers.0.self_attn.qkv_proj.weight"], _KNOWN),
        # No names were told, or none that is like another.
        (["lm_haed.weight"], [], _KNOWN),
        (["optimizer.state"], None, _KNOWN),
        # Too long to be compared.
        (["lm_head." + 300 * "x"], None, _KNOWN),
        # Nothing is known of the engine.
        (["lm_haed.weight"], None, []),
    ],
)
async def test_nothing_is_suggested(
    names: list[str], refused: list[str] | None, known: Iterable[str]
) -> None:
    assert await _suggested(names, refused, known) == ""


async def test_another_error_stays_what_it_is() -> None:
    error = WeightSyncError(Reason.ENGINE_AWAY, "gone", retry_after_s=1.0)
    accepted: LayoutCompatibility = _Accepted(_KNOWN)  # type: ignore[assignment]
    assert await add_suggestion(error, [], accepted) is error
