"""One step of a training run as a version: pushed once however often it is repeated, and applied.

It knows no framework: what a framework calls at the end of a step calls `push_step`.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from weightsync.errors import Reason
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, NotFoundError, refuse
from weightsync_client.options import ApplyOptions, PushOptions, check_options
from weightsync_client.rpc.validate import metadata
from weightsync_client.source.source import PushSource
from weightsync_client.source.trainer_ranks import TrainerRanks
from weightsync_client.types import ApplyReport, PushResult

__all__ = ["PushedStep", "StepOptions", "push_iterable", "push_part", "push_step"]

#: One value for many steps would make each a repetition of the first.
_PER_STEP = ("idempotency_key", "version")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How every step of a run is pushed and applied.

    Attributes:
        push: Of `Client.push`, but for those that each step has one of its own of.
        apply: Of `Client.apply`, but for the key; None: versions are pushed and not applied.

    Raises:
        TypeError: There is no such option.
        InvalidError: One of them can only be given for a single push or apply.
    """

    push: PushOptions = field(default_factory=PushOptions)
    apply: ApplyOptions | None = None

    def __post_init__(self) -> None:
        check_options("push", self.push, PushOptions)
        check_options("apply", self.apply or {}, ApplyOptions)
        metadata(self.push.get("metadata", {}))
        for name in _PER_STEP:
            if name in self.push or name in (self.apply or {}):
                raise refuse(
                    Reason.REQUEST_INVALID,
                    f"{name} is given for all steps, but each step has its own; leave it out",
                )


@dataclass(frozen=True, slots=True)
class PushedStep:
    """What was done with a step.

    Attributes:
        push: The version that it is.
        apply: None: it was not to be applied, or another rank did it.
        push_s: Seconds that the training stood still for the push.
        apply_s: The same for the apply.
    """

    push: PushResult
    apply: ApplyReport | None
    push_s: float
    apply_s: float

    def metrics(self) -> dict[str, float]:
        """Return what a training log should say of it; durations in seconds."""
        found: dict[str, float] = {
            "weightsync/version": self.push.version,
            "weightsync/sent_bytes": self.push.sent_bytes,
            "weightsync/push_seconds": self.push_s,
        }
        if self.apply is not None:
            found["weightsync/apply_seconds"] = self.apply_s
            found["weightsync/paused_seconds"] = self.apply.phases.paused_total_s
        return found


def push_step(
    client: Client, source: PushSource, step: int, run_id: str, options: StepOptions
) -> PushedStep:
    """Push the weights of a step, and apply them if asked: then the engine serves just these.

    A step that a resumed run repeats with the same weights is the version that it was, and none of
    its bytes are sent. With other weights, as not every training repeats itself to the bit, it
    becomes a new version.

    Args:
        client: To the server.
        source: The model.
        step: Number of optimizer steps that led to it.
        run_id: Name of the training run; a resumed run keeps it.
        options: The same for all steps of the run.

    Raises:
        ClientError: Of the push or the apply; a note says so if the version exists.
    """
    # Of the ranks of a trainer this one alone pushes: parts of tensors are refused at once.
    pushing = {**_with_metadata(options, _step_labels(step, run_id)), "writers": 1}
    push = functools.partial(_push_once, client, source, f"{run_id}/{step}", pushing)
    if options.apply is None:
        return _measured(push, None, "")
    apply = functools.partial(_apply, client, source, pushing, options.apply)
    return _measured(push, apply, f"step {step}")


def push_part(
    client: Client,
    source: PushSource,
    step: int,
    run_id: str,
    options: StepOptions,
    ranks: TrainerRanks,
) -> PushedStep:
    """Push what this rank holds of a step, as all ranks do; rank 0 applies the version if asked.

    No rank has all of the weights, so none can tell whether a step that is repeated has those of
    before: each call makes a new version.

    Args:
        client: To the server; of this rank.
        source: The model; this rank has parts of it.
        step: Number of optimizer steps that led to it.
        run_id: Name of the training run.
        options: The same for all steps of the run, and on all ranks.
        ranks: All that push.

    Raises:
        ClientError: Of the push or the apply, on all ranks; a note says so if the version exists.
    """
    pushing = {**_with_metadata(options, _step_labels(step, run_id)), "step": step}
    push = functools.partial(client.push, source, idempotency_key=ranks.next_key(), **pushing)
    together = functools.partial(ranks.together, push)
    if options.apply is None:
        return _measured(together, None, "")
    applying = options.apply

    def apply(pushed: PushResult) -> tuple[PushResult, ApplyReport | None]:
        return pushed, ranks.on_first(lambda: client.apply(pushed.version, **applying))

    return _measured(together, apply, f"step {step}")


def push_iterable(
    client: Client,
    tensors: Iterable[tuple[str, object]],
    name: str,
    labels: Mapping[str, str],
    options: StepOptions,
) -> PushedStep:
    """Push tensors that can be read only once, and apply them if asked.

    Each call makes a new version. The pushes have no key in common with those of a run before:
    where one stood for other weights, the tensors would have to be pushed again, and cannot be.

    Args:
        client: To the server.
        tensors: Names and tensors.
        name: What they are, for an error.
        labels: Metadata of the version.
        options: The same for all pushes of the run.

    Raises:
        ClientError: Of the push or the apply; a note says so if the version exists.
    """
    push = functools.partial(client.push, tensors, **_with_metadata(options, labels))
    if options.apply is None:
        return _measured(push, None, "")
    applying = options.apply

    def apply(pushed: PushResult) -> tuple[PushResult, ApplyReport]:
        return pushed, client.apply(pushed.version, **applying)

    return _measured(push, apply, name)


def _step_labels(step: int, run_id: str) -> dict[str, str]:
    return {"run_id": run_id, "step": str(step)}


def _with_metadata(options: StepOptions, ours: Mapping[str, str]) -> dict[str, Any]:
    pushing: dict[str, Any] = {**options.push}
    pushing["metadata"] = {**ours, **pushing.get("metadata", {})}
    return pushing


def _measured(
    push: Callable[[], PushResult],
    apply: Callable[[PushResult], tuple[PushResult, ApplyReport | None]] | None,
    name: str,
) -> PushedStep:
    started = time.monotonic()
    pushed = push()
    ended = time.monotonic()
    if apply is None:
        return PushedStep(pushed, None, ended - started, 0.0)
    try:
        pushed, report = apply(pushed)
    except ClientError as error:
        error.add_note(f"{name} is version {pushed.version}, which was not applied")
        raise
    return PushedStep(pushed, report, ended - started, time.monotonic() - ended)


def _push_once(client: Client, source: PushSource, key: str, options: dict[str, Any]) -> PushResult:
    try:
        return client.push(source, idempotency_key=key, **options)
    except ClientError as error:
        if error.reason is not Reason.VERSION_CONFLICT:
            raise
        unfinished = error.metadata.get("push_id", "")
    if unfinished:
        # A push that a crash has left, and that this one cannot go on with.
        with contextlib.suppress(NotFoundError):  # It may have run out by now.
            client.abort(unfinished)
        return client.push(source, idempotency_key=key, **options)
    # The key stands for other weights, which may be served: these get a version of their own.
    return client.push(source, **options)


def _apply(
    client: Client,
    source: PushSource,
    pushing: dict[str, Any],
    options: ApplyOptions,
    pushed: PushResult,
) -> tuple[PushResult, ApplyReport]:
    try:
        return pushed, client.apply(pushed.version, **options)
    except ClientError as error:
        if error.reason is not Reason.VERSION_BELOW_LIVE:
            raise
    # A resumed run repeats a step before the one that is live, or the best step was an earlier one;
    # applies only go up.
    pushed = client.push(source, **pushing)
    return pushed, client.apply(pushed.version, **options)
