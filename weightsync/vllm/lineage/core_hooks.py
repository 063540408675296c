"""Utilities of vLLM's EngineCore that keep keys apart by version, and their calls."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from typing import Any

from weightsync.vllm.lineage.core_keys import CoreKeys, lacking

__all__ = ["BEGIN", "MOVE", "SWITCH", "add_utilities"]

logger = logging.getLogger(__name__)

#: Names of the utilities, as `call_utility_async` takes them.
BEGIN, MOVE, SWITCH = (
    "weightsync_begin_keys",
    "weightsync_move_keys",
    "weightsync_switch_keys",
)

_KEYS = "weightsync_keys"


def _begin(core: Any, key: str) -> str:
    """Keep keys apart from now on; returns why that cannot be done here, "" if it is."""
    if getattr(core, _KEYS, None) is not None:
        return ""
    if name := lacking(core):
        return f"this vLLM has no {name}"
    setattr(core, _KEYS, CoreKeys(core, key))
    return ""


def _move(core: Any, key: str, recompute: bool) -> dict[str, float]:  # noqa: FBT001 - of a utility
    """Begin with another version's keys, before the next step; see `CoreKeys.move`."""
    try:
        return dict(getattr(core, _KEYS).move(key, recompute=recompute))
    except Exception:
        # Whatever is half done: no key of before is left that could be read, under either name.
        logger.exception("weightsync: the key-value cache is cleared instead")
        getattr(core, _KEYS).key = _unknown()
        core.scheduler.reset_prefix_cache(reset_running_requests=True)
        core.scheduler.reset_encoder_cache()
        core.model_executor.reset_encoder_cache()
        getattr(core, _KEYS).key = key
        return {"cleared": 1}


def _switch(
    core: Any,
    method: str,
    args: Mapping[str, Any],
    digests: list[str],
    key: str,
    recompute: bool,  # noqa: FBT001 - of a utility
) -> list[Any]:
    """Call a method of the workers, and move before the next step.

    Args:
        core: The EngineCore.
        method: The method, which every worker answers with a dictionary.
        args: Its one argument.
        digests: Of the content before and of that afterwards.
        key: Name of the keys of the latter.
        recompute: As `_move`.

    Returns:
        The replies, and last what `_move` returned, with the present key.
    """
    present = getattr(core, _KEYS).key
    try:
        replies = core.collective_rpc(method, None, (dict(args),), None)
        proved = {_proved(reply, *digests) for reply in replies}
    except Exception:
        _move(core, _unknown(), recompute=True)
        raise
    if proved == {digests[1]}:
        present = key
    elif proved != {digests[0]}:
        # Until the bridge fences it, the engine computes from weights that no one can name.
        present, recompute = _unknown(), True
    return [*replies, {**_move(core, present, recompute), "key": present}]


def _proved(reply: Mapping[str, Any], before: str, after: str) -> str:
    """Return the digest of what a rank has proved to hold, "" if it is in doubt."""
    done = bool(reply.get("ok")) and not reply.get("dirty")
    wanted = after if done else before
    return wanted if reply.get("content_digest") == wanted else ""


def _unknown() -> str:
    return f"weightsync:unknown.{secrets.token_hex(8)}"


def add_utilities(core_class: type) -> None:
    """Let an EngineCore be asked for them; nothing else changes. Repeating it is harmless."""
    for name, utility in ((BEGIN, _begin), (MOVE, _move), (SWITCH, _switch)):
        setattr(core_class, name, utility)
