"""A rank of a sharded trainer on another host than the server: pushes its part, two steps."""

from __future__ import annotations

import json
import sys

from tests.matrix.test_box_deltas import WRITERS, changed, matrix, part
from weightsync_client import Access, Client

__all__ = ["SEED", "push_steps"]

SEED = 50


def push_steps(client: Client, writer: int) -> list[dict[str, str]]:
    """Push two steps as one of several ranks; return what came of each."""
    steps = []
    weights = matrix(SEED)
    for step in range(2):
        result = client.push(
            part(weights, writer, 0),
            idempotency_key=f"hosts/{step}",
            writers=WRITERS,
            writer=writer,
        )
        way, kind = str(result.way), str(result.kind)
        steps.append({"digest": result.content_digest, "way": way, "kind": kind})
        weights = changed(weights, SEED + 1)
    return steps


if __name__ == "__main__":
    address, ca, token, number = sys.argv[1:]
    with Client(address, access=Access(token=token, tls_ca=ca)) as far:
        sys.stdout.write(json.dumps(push_steps(far, int(number))))
