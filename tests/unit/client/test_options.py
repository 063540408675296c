"""What a caller may say, and what is refused before a byte is sent."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest

from weightsync_client import AsyncClient, Client

TENSORS = {"t": np.arange(4, dtype=np.float32)}

MISSPELT = [
    ("push", (TENSORS,), "same_hosts", "same_host"),
    ("push", (TENSORS,), "idempotencykey", "idempotency_key"),
    ("push_async", (TENSORS,), "meta_data", "metadata"),
    ("apply", (1,), "dryrun", "dry_run"),
    ("apply", (1,), "Pause", "pause"),
    ("rollback", ("why",), "timeout", "timeout_s"),
]
# Options of other methods, like which there is none.
FOREIGN = [("rollback", ("why",), "dry_run"), ("push", (TENSORS,), "clear_rejected")]
CASES = [*MISSPELT, *((*case, "") for case in FOREIGN)]


async def call(client: Client | AsyncClient, method: str, *arguments: Any, **options: Any) -> Any:
    answer = getattr(client, method)(*arguments, **options)
    return await answer if inspect.isawaitable(answer) else answer


@pytest.mark.parametrize("kind", [Client, AsyncClient])
@pytest.mark.parametrize(("method", "arguments", "wrong", "meant"), CASES)
async def test_options_that_do_not_exist_are_refused(
    running: Any, kind: Any, method: str, arguments: Any, wrong: str, meant: str
) -> None:
    client = kind(running.address)
    hint = f". Did you mean {meant!r}?" if meant else ""
    try:
        with pytest.raises(TypeError) as refused:
            await call(client, method, *arguments, **{wrong: True})
        sentence = f"{method}() got an unexpected keyword argument {wrong!r}{hint}"
        assert str(refused.value) == sentence
        assert not running.servicer.calls
    finally:
        await call(client, "close")
