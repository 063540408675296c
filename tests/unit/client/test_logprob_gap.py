"""The gap of log probabilities: by version, without tokens of older keys, in few calls."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client import AsyncClient, Client, InvalidError, Spans, TokenSpans, VersionSpan
from weightsync_client.logprob_gap import Versions, logprob_gaps

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.unit.client.servicer import Running, Servicer

#: d of each token, the engine's less the trainer's, and what k3 makes of it.
SERVED, OWN = [-0.5, -1.0, -2.0], [-0.7, -1.0, -1.0]
APART = [0.2, 0.0, -1.0]
K3 = [math.exp(-d) - 1 + d for d in APART]


def _spans(*parts: tuple[int, int], keys: tuple[int, ...] | None = ()) -> TokenSpans:
    spans, at = [], 0
    for version, count in parts:
        spans.append(VersionSpan(version, at, at + count))
        at += count
    return TokenSpans(tuple(spans), keys)


def _told(gaps: Iterable[pb.LogprobGap]) -> dict[int, tuple[int, float, float, float]]:
    return {one.version: (one.tokens, one.sum_abs, one.sum_k3, one.max_abs) for one in gaps}


def _near(*values: float) -> Any:
    return pytest.approx(values, abs=1e-12)


def test_it_is_summed_over_the_tokens_of_a_version() -> None:
    told = _told(logprob_gaps(7, SERVED, OWN))
    assert told == {7: _near(3, 1.2, sum(K3), 1.0)}
    # k3 is that of the engine's less the trainer's, and another one the other way round.
    assert sum(K3) != pytest.approx(sum(math.exp(d) - 1 - d for d in APART))


def test_each_token_counts_for_the_version_that_made_it() -> None:
    told = _told(logprob_gaps(_spans((41, 1), (42, 2)), SERVED, OWN))
    assert told == {41: _near(1, 0.2, K3[0], 0.2), 42: _near(2, 1.0, K3[2], 1.0)}


@pytest.mark.parametrize(
    ("keys", "counted"),
    [
        ((), {41: 1, 42: 2}),
        # Those of 42 may have been computed with keys of 41.
        ((41,), {41: 1}),
        ((40, 41), {}),
        # None of these is older than a token.
        ((42,), {41: 1, 42: 2}),
        # vLLM's own field does not tell.
        (None, {41: 1}),
    ],
)
def test_tokens_whose_keys_are_older_are_left_out(
    keys: tuple[int, ...] | None, counted: dict[int, int]
) -> None:
    gaps = logprob_gaps(_spans((41, 1), (42, 2), keys=keys), SERVED, OWN)
    assert {one.version: one.tokens for one in gaps} == counted


def test_many_sequences_come_in_one_report(client: Client, servicer: Servicer) -> None:
    mixed = Spans((1, 2), (_spans((1, 1), (2, 1)),))
    answers: list[Versions] = [_spans((1, 2)), Spans((2,)), 2, mixed]
    served = [[-1.0, -1.0], torch.tensor([-1.0, -2.0]), np.array([-3.0]), (-4.0, -5.0)]
    own = [[-1.5, -1.0], torch.tensor([-1.0, -2.0]).bfloat16(), [-3.0], [-4.0, -5.25]]
    assert client.report_logprobs(answers, served, own, trained_version=3) == 7
    (request,) = (one for one in servicer.requests if isinstance(one, pb.ReportLogprobsRequest))
    assert (request.model, request.trained_version) == ("policy", 3)
    assert _told(request.gaps) == {
        1: _near(3, 0.5, math.exp(-0.5) - 1 + 0.5, 0.5),
        2: _near(4, 0.25, math.exp(-0.25) - 1 + 0.25, 0.25),
    }


def test_one_answer_with_several_choices_names_the_versions_of_each() -> None:
    answer = Spans((1, 2), (_spans((1, 2)), _spans((2, 1))))
    gaps = logprob_gaps(answer, [[-1, -1], [-1]], [[-1, -1], [-1]])
    assert {one.version: one.tokens for one in gaps} == {1: 2, 2: 1}
    # One version may have made all of them.
    gaps = logprob_gaps(5, torch.zeros(3, 2), torch.zeros(3, 2))
    assert {one.version: one.tokens for one in gaps} == {5: 6}


async def test_more_versions_than_one_call_takes(
    client: Client, servicer: Servicer, running: Running
) -> None:
    served = [[-1.0]] * 70
    versions = list(range(1, 71))
    assert client.report_logprobs(versions, served, served) == 70
    sizes = [len(one.gaps) for one in servicer.requests if hasattr(one, "gaps")]
    assert sizes == [64, 6]
    async with AsyncClient(running.address) as other:
        assert await other.report_logprobs(versions, served, served) == 70
    sizes = [len(one.gaps) for one in servicer.requests if hasattr(one, "gaps")]
    assert sizes == [64, 6, 64, 6]


def test_nothing_is_sent_of_no_tokens(client: Client, servicer: Servicer) -> None:
    assert client.report_logprobs(_spans((2, 2), keys=(1,)), [-1, -1], [-1, -1]) == 0
    assert client.report_logprobs([], [], []) == 0
    assert client.report_logprobs([TokenSpans(()), TokenSpans(())], [[], []], [[], []]) == 0
    assert "ReportLogprobs" not in servicer.calls


def test_tokens_that_are_far_apart_have_a_finite_sum() -> None:
    (gap,) = logprob_gaps(1, [-9999.0, -0.1], [-0.1, -9999.0])
    assert math.isfinite(gap.sum_k3)
    assert gap.max_abs == pytest.approx(9998.9)


WRONG = [
    (
        (1, [-1.0], [-1.0, -2.0]),
        "give as many own logprobs as sequence 0 has of the answer, 1, not 2",
    ),
    ((1, [[-1.0], [-1.0]], [[-1.0]]), "give own logprobs for each of 2 sequences served, not for"),
    (([1], [[-1.0], [-1.0]], [[-1.0]] * 2), "give versions for each of 2 sequences, not for 1"),
    ((_spans((1, 2)), [-1.0], [-1.0]), "give a logprob for each of 2 tokens of sequence 0, not 1"),
    ((1, [None], [-1.0]), "served logprobs of sequence 0 are not all finite numbers"),
    ((1, [-1.0], [math.nan]), "own logprobs of sequence 0 are not all finite numbers"),
    ((1, "text", [-1.0]), "served is str; use a list of logprobs"),
    ((1, 7, [-1.0]), "served is int; use a list of logprobs"),
    ((0, [-1.0], [-1.0]), "version is 0; use a whole number from 1"),
    (("x", [-1.0], [-1.0]), "version is 'x'; use a whole number from 1"),
    ((Spans((1, 2)), [-1.0], [-1.0]), "send x-weightsync-spans: 1 with the request"),
]


@pytest.mark.parametrize(("given", "message"), WRONG)
def test_what_does_not_fit_is_refused_and_nothing_is_sent(
    client: Client, servicer: Servicer, given: Any, message: str
) -> None:
    with pytest.raises(InvalidError) as caught:
        client.report_logprobs(*given)
    assert message in caught.value.message
    with pytest.raises(InvalidError, match="trained_version is -1"):
        client.report_logprobs(1, [-1.0], [-1.0], trained_version=-1)
    assert "ReportLogprobs" not in servicer.calls
