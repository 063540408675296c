"""How far log probabilities that came with answers are from the trainer's own, by version."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from weightsync.v1 import weightsync_pb2 as pb
from weightsync_client.errors import invalid
from weightsync_client.rpc.validate import whole_number
from weightsync_client.spans import Spans, TokenSpans

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

#: What a difference counts for at most in k3, whose sum would be infinite otherwise.
_MOST_APART = 100.0

#: What made an answer: one version, or as `versions_of` says.
Versions = int | Spans | TokenSpans


class _Sequence(NamedTuple):
    """One sequence: the version of each token, 0 where it is left out, and d of each."""

    versions: NDArray[np.int64]
    apart: NDArray[np.float64]


def logprob_gaps(
    versions: Versions | Sequence[Versions], served: Any, own: Any
) -> list[pb.LogprobGap]:
    """Return the gap of each version, oldest first; tokens whose keys are older are in none.

    `served` and `own` are the log probabilities of one sequence or a list of them, one a token.

    Raises:
        InvalidError: They do not fit each other, or one is no finite number.
    """
    import numpy as np

    parts = list(_sequences(versions, served, own))
    made = np.concatenate([part.versions for part in parts]) if parts else np.zeros(0, np.int64)
    apart = np.concatenate([part.apart for part in parts]) if parts else np.zeros(0)
    counted = made > 0
    known, places = np.unique(made[counted], return_inverse=True)
    apart = apart[counted]
    # exp(-d) - 1 + d, where d is the engine's less the trainer's.
    near = np.clip(apart, -_MOST_APART, _MOST_APART)
    k3 = np.expm1(-near) + near
    gaps = []
    for at, version in enumerate(known.tolist()):
        here = places == at
        gaps.append(
            pb.LogprobGap(
                version=version,
                tokens=int(here.sum()),
                sum_abs=float(np.abs(apart[here]).sum()),
                sum_k3=max(0.0, float(k3[here].sum())),
                max_abs=float(np.abs(apart[here]).max()),
            )
        )
    return gaps


def _sequences(versions: Any, served: Any, own: Any) -> Iterable[_Sequence]:
    theirs, ours = _batch("served", served), _batch("own", own)
    if len(theirs) != len(ours):
        raise invalid(
            f"give own logprobs for each of {len(theirs)} sequences served, not for {len(ours)}"
        )
    made = _versions(versions, len(theirs))
    for index, (of, their, our) in enumerate(zip(made, theirs, ours, strict=True)):
        yield _sequence(index, of, _numbers("served", index, their), _numbers("own", index, our))


def _batch(what: str, value: Any) -> list[Any]:
    """Return sequences; what has numbers in it is one."""
    if getattr(value, "ndim", None) == 1:
        return [value]
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise invalid(f"{what} is {type(value).__name__}; use a list of logprobs, or of such lists")
    items = list(value)
    nested = [isinstance(item, Iterable) and getattr(item, "ndim", 1) > 0 for item in items]
    return items if all(nested) else [items]


def _versions(versions: Any, count: int) -> list[TokenSpans | int]:
    given = [versions] if isinstance(versions, (int, Spans, TokenSpans)) else list(versions)
    found: list[TokenSpans | int] = []
    for one in given:
        if isinstance(one, Spans) and one.sequences:
            found += one.sequences
        elif isinstance(one, Spans) and len(one.versions) == 1:
            found.append(one.versions[0])
        elif isinstance(one, Spans):
            one.per_token()  # Refuses it.
        elif isinstance(one, TokenSpans):
            found.append(one)
        else:
            found.append(whole_number("version", one, 1))
    if len(found) == 1 and count > 1 and isinstance(versions, int):
        found *= count
    if len(found) != count:
        raise invalid(f"give versions for each of {count} sequences, not for {len(found)}")
    return found


def _numbers(what: str, index: int, values: Any) -> NDArray[np.float64]:
    import numpy as np

    if hasattr(values, "detach"):
        # NumPy has no bfloat16.
        values = values.detach().to("cpu").double()
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        numbers = np.full(1, math.nan)
    if numbers.ndim != 1 or not np.isfinite(numbers).all():
        raise invalid(
            f"{what} logprobs of sequence {index} are not all finite numbers, one a token; leave "
            "out sequences with NaN or without logprobs, and look for what made them"
        )
    return numbers


def _sequence(
    index: int,
    of: TokenSpans | int,
    served: NDArray[np.float64],
    own: NDArray[np.float64],
) -> _Sequence:
    import numpy as np

    if len(served) != len(own):
        raise invalid(
            f"give as many own logprobs as sequence {index} has of the answer, {len(served)}, "
            f"not {len(own)}"
        )
    if isinstance(of, int):
        made = np.full(len(served), of, dtype=np.int64)
    else:
        spans = np.asarray([(s.version, s.end - s.start) for s in of.spans], np.int64)
        made = np.repeat(*spans.reshape(-1, 2).T)
        if len(made) != len(served):
            raise invalid(
                f"give a logprob for each of {len(made)} tokens of sequence {index}, not "
                f"{len(served)}"
            )
        # Where vLLM does not tell whose keys it used, those of any token before may be among them.
        keys = [span.version for span in of.spans] if of.keys is None else of.keys
        made[made > min(keys, default=math.inf)] = 0
    return _Sequence(made, served - own)
