from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weightsync.vllm.worker_protocol import rank_name, rank_names


def _parallel(dp: int = 1, pp: int = 1, tp: int = 1, **more: Any) -> SimpleNamespace:
    return SimpleNamespace(
        data_parallel_size=dp,
        data_parallel_rank=0,
        pipeline_parallel_size=pp,
        tensor_parallel_size=tp,
        **more,
    )


@pytest.mark.parametrize(
    ("sizes", "names"),
    [
        ((1, 1, 1), ["0/0/0"]),
        ((1, 1, 2), ["0/0/0", "0/0/1"]),
        ((1, 2, 2), ["0/0/0", "0/0/1", "0/1/0", "0/1/1"]),
        ((2, 2, 1), ["0/0/0", "0/1/0", "1/0/0", "1/1/0"]),
        ((3, 1, 1), ["0/0/0", "1/0/0", "2/0/0"]),
    ],
)
def test_ranks_are_named_core_by_core(sizes: tuple[int, int, int], names: list[str]) -> None:
    assert list(rank_names(_parallel(*sizes))) == names


def test_a_worker_calls_itself_what_the_bridge_calls_it() -> None:
    dp, pp, tp = 2, 3, 2
    own = [
        rank_name(_parallel(dp, pp, tp, data_parallel_index=core), rank)
        for core in range(dp)
        for rank in range(pp * tp)
    ]
    assert own == list(rank_names(_parallel(dp, pp, tp, data_parallel_index=0)))


def test_a_worker_of_a_dense_model_knows_its_engine_core() -> None:
    # vLLM tells it that it is alone, but for the index.
    assert rank_name(_parallel(data_parallel_index=1), 0) == "1/0/0"
    assert rank_name(_parallel(), 0) == "0/0/0"
