"""Probes of a version: sequences, and what the trainer computes for their tokens.

The gate of an apply has the engine score them, and compares.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import operator
import os
import reprlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from weightsync.v1 import weightsync_pb2 as pb
from weightsync.wire.extras import needing
from weightsync_client.errors import invalid
from weightsync_client.source.modules import innermost
from weightsync_client.source.peft_models import has_adapters, merged_tensors

if TYPE_CHECKING:
    import torch


_MOST_PROBES, _LEAST_TOKENS, _MOST_TOKENS = 64, 2, 512
_MOST_ID = 2**32 - 1
#: What rounding may put a log probability above 0.
_ROUNDING = 1e-3
#: Bytes of a file of probes; 64 of 512 tokens, with all digits, take less than half of it.
_MOST_BYTES = 4 << 20
#: Rows of logits that are converted to float32 at a time: of 152,000 tokens they take 78 MB.
_ROWS = 128


@dataclass(frozen=True, slots=True, init=False)
class Probes:
    """1 to 64 sequences of 2 to 512 token ids, whole and checked; they never change.

    Attributes:
        tokens: The ids of each sequence.
        logprobs: Of each sequence, the natural log probability of its tokens from `start` on, given
            all tokens before them, at temperature 1, as the pushed weights compute it in evaluation
            mode; empty: it is not compared with the engine's. Those are finite all the same, and
            compared with the ones of the version before where a gate asks for that.
        start: Of each sequence, the index of the first token that has one, from 1 on.

    Raises:
        InvalidError: One sentence that names what is wrong.
    """

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]
    start: tuple[int, ...]

    def __init__(
        self,
        tokens: Iterable[Any],
        logprobs: Iterable[Any] | None = None,
        start: int | Iterable[int] = 1,
    ) -> None:
        sequences = _sequences(tokens)
        starts = _starts(start, sequences)
        object.__setattr__(self, "tokens", sequences)
        object.__setattr__(self, "start", starts)
        object.__setattr__(self, "logprobs", _logprobs(logprobs, sequences, starts))

    @classmethod
    def of(cls, model: torch.nn.Module, sequences: Iterable[Any]) -> Self:
        """Return probes with the log probabilities that a model computes, which is left as it was.

        It computes them in evaluation mode, without gradients, one sequence at a time, whether it
        is in training mode or not; afterwards, and after any error, the mode of every part of it,
        the adapters of a PEFT model, which are merged meanwhile as they are pushed, and the state
        of PyTorch's random numbers are what they were. Where ranks have parts of the model (FSDP,
        tensor parallel), every one of them calls this with the same sequences, and each gets the
        same probes; a push sends those of one.

        Args:
            model: A causal language model of transformers, wrapped or not, or any module that
                returns logits for a batch of token ids: a tensor, or an object with `.logits`.
            sequences: 1 to 64 of 2 to 512 token ids, lists or tensors.

        Raises:
            InvalidError: Of the sequences, or of what the model returns.
            ExhaustedError: There is no memory to merge the adapters of a PEFT model.
        """
        given = _sequences(sequences)
        with needing("Probes.of()"):
            import torch
        if not isinstance(model, torch.nn.Module):
            raise invalid(f"model is {type(model).__name__}; give a torch.nn.Module")
        with _evaluating(model) as scored:
            found = [scored(index, ids) for index, ids in enumerate(given)]
        return cls(given, found)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Return what `save` has written.

        Raises:
            InvalidError: The file cannot be read, or is none of probes.
        """
        try:
            with Path(path).open("rb") as file:
                data = file.read(_MOST_BYTES + 1)
        except OSError as error:
            raise invalid(f"give a file of probes that can be read: {error}") from None
        if len(data) > _MOST_BYTES:
            raise invalid(f"give a file as Probes.save writes it: {path} has more than 4 MiB")
        try:
            probes = json.loads(data)["probes"]
            tokens = [probe["tokens"] for probe in probes]
            logprobs = [probe.get("logprobs") or () for probe in probes]
            starts = [probe.get("start", 1) for probe in probes]
        except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
            raise invalid(
                f'give a file as Probes.save writes it, {{"probes": [{{"tokens": [...], '
                f'"logprobs": [...], "start": 1}}]}}: {path} is none'
            ) from None
        return cls(tokens, logprobs, starts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write them as JSON, for `weightsync push --probes FILE`; a file that is there goes."""
        probes = [
            {"tokens": tokens, "logprobs": logprobs, "start": start}
            for tokens, logprobs, start in self._each()
        ]
        Path(path).write_text(json.dumps({"probes": probes}) + "\n")

    @classmethod
    def from_message(cls, message: pb.Probes) -> Self:
        """Return those of a message, checked again."""
        probes = message.probes
        return cls(
            [probe.tokens for probe in probes],
            [probe.logprobs for probe in probes],
            [probe.start or 1 for probe in probes],
        )

    def to_message(self) -> pb.Probes:
        """Return them as a push sends them; never more than 512 KiB."""
        return pb.Probes(
            probes=[
                pb.Probe(tokens=tokens, logprobs=logprobs, start=start)
                for tokens, logprobs, start in self._each()
            ]
        )

    def _each(self) -> Iterator[tuple[tuple[int, ...], tuple[float, ...], int]]:
        return zip(self.tokens, self.logprobs, self.start, strict=True)


def check_probes(value: object) -> Probes | None:
    """Return probes, or None, as an option of a push gives them; refuse anything else."""
    if value is not None and not isinstance(value, Probes):
        raise invalid(
            f"probes is {reprlib.repr(value)}; use Probes(...), Probes.of(...) or Probes.load(...)"
        )
    return value


# What callers give.


def _listed(what: str, value: Any) -> list[Any]:
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise invalid(f"{what} is {reprlib.repr(value)}; use a list or a tensor")
    return list(value)


def _sequences(tokens: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    given = _listed("the sequences", tokens)
    if not 1 <= len(given) <= _MOST_PROBES:
        raise invalid(f"give 1 to {_MOST_PROBES} sequences, not {len(given)}")
    return tuple(_ids(index, sequence) for index, sequence in enumerate(given))


def _ids(index: int, sequence: Any) -> tuple[int, ...]:
    ids = _listed(f"sequence {index}", sequence)
    if not _LEAST_TOKENS <= len(ids) <= _MOST_TOKENS:
        raise invalid(
            f"give {_LEAST_TOKENS} to {_MOST_TOKENS} token ids: sequence {index} has {len(ids)}"
        )
    for at, one in enumerate(ids):
        if not _is_whole(one) or not 0 <= operator.index(one) <= _MOST_ID:
            raise invalid(
                f"token {at} of sequence {index} is {reprlib.repr(one)}; use token ids, whole "
                "numbers from 0"
            )
    return tuple(map(operator.index, ids))


def _is_whole(value: object) -> bool:
    return hasattr(value, "__index__") and not isinstance(value, bool)


def _starts(start: Any, sequences: Sequence[Sequence[int]]) -> tuple[int, ...]:
    starts = [start] * len(sequences) if _is_whole(start) else _listed("start", start)
    if len(starts) != len(sequences):
        raise invalid(f"give one start for each of {len(sequences)} sequences, not {len(starts)}")
    for index, (one, ids) in enumerate(zip(starts, sequences, strict=True)):
        if not _is_whole(one) or not 1 <= one < len(ids):
            raise invalid(
                f"start is {reprlib.repr(one)} for sequence {index} of {len(ids)} tokens; use an "
                f"index from 1 to {len(ids) - 1}"
            )
    return tuple(map(operator.index, starts))


def _logprobs(
    logprobs: Iterable[Any] | None, sequences: Sequence[Sequence[int]], starts: Sequence[int]
) -> tuple[tuple[float, ...], ...]:
    if logprobs is None:
        return ((),) * len(sequences)
    given = _listed("logprobs", logprobs)
    if len(given) != len(sequences):
        raise invalid(f"give logprobs for each of {len(sequences)} sequences, not {len(given)}")
    found = []
    for index, (one, ids, start) in enumerate(zip(given, sequences, starts, strict=True)):
        values = _listed(f"logprobs of sequence {index}", () if one is None else one)
        if values and len(values) != len(ids) - start:
            raise invalid(
                f"give {len(ids) - start} logprobs for sequence {index}, one for each of its "
                f"{len(ids)} tokens from {start} on, not {len(values)}"
            )
        found.append(tuple(_logprob(index, start + at, each) for at, each in enumerate(values)))
    return tuple(found)


def _logprob(index: int, token: int, value: Any) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number > _ROUNDING:
        raise invalid(
            f"the logprob of token {token} of sequence {index} is {reprlib.repr(value)}; use "
            "natural log probabilities, which are finite and at most 0, and look for NaN in the "
            "weights if a model computed it"
        )
    return min(number, 0.0)


# What a model computes.


@contextlib.contextmanager
def _evaluating(
    model: torch.nn.Module,
) -> Iterator[Callable[[int, tuple[int, ...]], list[float]]]:
    """Have a model in evaluation mode, its adapters merged; put everything back at the end."""
    import torch

    modes = [(module, module.training) for module in model.modules()]
    devices = {p.device.index for p in model.parameters() if p.device.type == "cuda"}
    restore = None
    try:
        with torch.no_grad(), torch.random.fork_rng(devices=sorted(devices)):
            if has_adapters(model):
                _, restore = merged_tensors(model)
            model.eval()
            yield _Scorer(innermost(model)).logprobs
    finally:
        try:
            if restore is not None:
                restore()
        finally:
            for module, training in modes:
                module.training = training
            _reshard(model)


def _reshard(model: Any) -> None:
    """Free what FSDP2 gathered and would keep for a backward."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    kind = getattr(fsdp, "FSDPModule", ())
    for module in model.modules():
        if isinstance(module, kind):
            module.reshard()


class _Scorer:
    def __init__(self, model: Any) -> None:
        self._model = model
        transformers = sys.modules.get("transformers.modeling_utils")
        base = getattr(transformers, "PreTrainedModel", ())
        #: A model of transformers keeps keys of what it computes, unless it is asked not to.
        ours = [part for part in model.modules() if isinstance(part, base)]
        #: A module around one may take the ids alone.
        self._named = bool(ours) and _takes_names(model)
        embedding = ours[0].get_input_embeddings() if ours else None
        self._most = getattr(embedding, "num_embeddings", None)
        weight = getattr(embedding, "weight", None)
        first = weight if weight is not None else next(model.parameters(), None)
        self._device = None if first is None else first.device

    def logprobs(self, index: int, ids: tuple[int, ...]) -> list[float]:
        """Return that of every token but the first."""
        import torch

        if self._most is not None:
            _check_known(index, ids, self._most)
        batch = torch.tensor([ids], dtype=torch.long, device=self._device)
        answer = (
            self._model(input_ids=batch, use_cache=False) if self._named else self._model(batch)
        )
        logits = _logits(answer)
        if logits.ndim != 3 or logits.shape[:2] != batch.shape:
            raise invalid(
                "give a model that returns logits of every token, as a tensor or as .logits: for "
                f"ids of shape {tuple(batch.shape)} this returns {tuple(logits.shape)}"
            )
        _check_known(index, ids, int(logits.shape[-1]))
        # The logits of a token are those of the one after it.
        following = torch.tensor(ids[1:], dtype=torch.long, device=logits.device)
        found: list[float] = []
        for begin in range(0, len(following), _ROWS):
            chosen = following[begin : begin + _ROWS]
            rows = logits[0, begin : begin + len(chosen)].float()
            found += rows.log_softmax(-1).gather(1, chosen[:, None])[:, 0].tolist()
        return found


def _check_known(index: int, ids: tuple[int, ...], known: int) -> None:
    if max(ids) >= known:
        # A GPU would be lost to this process by it.
        raise invalid(f"sequence {index} has the token id {max(ids)}; the model knows {known}")


def _takes_names(model: Any) -> bool:
    """Whether a module takes what models of transformers take, by name."""
    given = inspect.signature(model.forward).parameters
    by_any_name = any(one.kind is one.VAR_KEYWORD for one in given.values())
    return by_any_name or {"input_ids", "use_cache"} <= given.keys()


def _logits(answer: Any) -> torch.Tensor:
    import torch

    logits = getattr(answer, "logits", answer)
    if not isinstance(logits, torch.Tensor):
        raise invalid(
            "give a model that returns logits, as a tensor or as .logits: this returns "
            f"{type(answer).__name__}"
        )
    # Of a DTensor every rank has a part.
    whole = getattr(logits, "full_tensor", None)
    return logits if whole is None else whole()
