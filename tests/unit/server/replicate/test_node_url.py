"""A node's settings: what no head can be found with is refused in one sentence."""

from __future__ import annotations

import pytest

from weightsync_server.flags import Flags

_HEAD = "grpc://127.0.0.1:50551"


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"node_rank": 1}, "name the engine's head"),
        ({"node_of": _HEAD}, "needs --node-rank"),
        ({"node_of": _HEAD, "node_rank": 1, "follow": _HEAD}, "leave out --follow"),
        ({"node_of": "s3://bucket/prefix", "node_rank": 1}, "use grpc://HOST:PORT"),
        ({"node_of": "grpc://127.0.0.1", "node_rank": 1}, "use grpc://HOST:PORT"),
        ({"node_of": "grpc://10.1.2.3:50551", "node_rank": 1}, "use grpcs://HOST:PORT"),
    ],
)
def test_a_node_without_a_usable_head_is_refused(given: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence) as caught:
        Flags.model_validate(given)
    assert ". " not in str(caught.value).split("[type=")[0].rstrip().removesuffix(".")


@pytest.mark.parametrize("head", [_HEAD, "grpcs://head.example:50551", "grpc://unix:/run/x.sock"])
def test_a_head_is_named_by_its_grpc_address(head: str) -> None:
    assert Flags.model_validate({"node_of": head, "node_rank": 1}).tree.replica.head == head
