"""One step of a training run as a version: pushed once however often it is repeated, and applied.

It knows no framework: what a framework calls at the end of a step calls `push_step`.
"""

from __future__ import annotations

import contextlib
import functools
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from logging import Logger
from typing import Any, Literal, TypedDict

from weightsync.errors import Reason
from weightsync_client.access import Access
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, NotFoundError, invalid
from weightsync_client.options import ApplyOptions, PushOptions, Retry, Timeouts, check_options
from weightsync_client.probes import Probes, check_probes
from weightsync_client.rpc.validate import metadata, text
from weightsync_client.source.flat_parameters import TrainerRanks
from weightsync_client.source.source import PushSource
from weightsync_client.types import ApplyReport, PushResult

#: One value for many steps would make each a repetition of the first.
_PER_STEP = ("idempotency_key", "version")


@dataclass(frozen=True, slots=True)
class StepOptions:
    """How every step of a run is pushed and applied.

    Attributes:
        push: Of `Client.push`, but for those that each step has one of its own of.
        apply: Of `Client.apply`, but for the key; None: versions are pushed and not applied.
        probes: Sequences of token ids, of which each step is pushed with what its model computes
            (`Probes.of`); None: with none, or with those of `push`.

    Raises:
        TypeError: There is no such option.
        InvalidError: One of them can only be given for a single push or apply.
    """

    push: PushOptions = field(default_factory=PushOptions)
    apply: ApplyOptions | None = None
    probes: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        check_options("push", self.push, PushOptions)
        check_options("apply", self.apply or {}, ApplyOptions)
        metadata(self.push.get("metadata", {}))
        given = check_probes(self.push.get("probes"))
        if self.probes is not None:
            # They may be read once only, and are wrong before the first step or never.
            object.__setattr__(self, "probes", Probes(self.probes).tokens)
        if given is not None and (self.probes is not None or any(given.logprobs)):
            raise invalid(
                "give sequences alone for all steps: the logprobs of probes are those of one step",
            )
        for name in _PER_STEP:
            if name in self.push or name in (self.apply or {}):
                raise invalid(
                    f"{name} is given for all steps, but each step has its own; leave it out",
                )


@dataclass(frozen=True, slots=True)
class PushedStep:
    """What was done with a step.

    Attributes:
        push: The version that it is.
        apply: None: it was not to be applied, or another rank did it.
        push_s: Seconds that the training was paused for the push.
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
    pushing |= _probes(options, source)
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
    pushing |= _probes(options, source)
    push = functools.partial(client.push, source, idempotency_key=ranks.next_key(), **pushing)
    together = functools.partial(ranks.together, push)
    if options.apply is None:
        return _measured(together, None, "")
    applying = options.apply

    def apply(pushed: PushResult) -> tuple[PushResult, ApplyReport | None]:
        return pushed, ranks.on_first(lambda: client.apply(pushed.version, **applying))

    return _measured(together, apply, f"step {step}")


def _step_labels(step: int, run_id: str) -> dict[str, str]:
    return {"run_id": run_id, "step": str(step)}


def _probes(options: StepOptions, source: PushSource) -> dict[str, Any]:
    """Return, as an option of its push, what the model of a step computes for its probes."""
    if options.probes is None:
        return {}
    model: Any = source
    return {"probes": Probes.of(model, options.probes)}


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


class ClientOptions(TypedDict, total=False):
    """Keyword options of `Client`, for an adapter that makes its own."""

    model: str | None
    timeouts: Timeouts | None
    retry: Retry | None
    access: Access | None


def apply_options(apply: bool | ApplyOptions) -> ApplyOptions | None:  # noqa: FBT001 - as users give it
    """Return the options of every apply; None: versions are pushed and not applied."""
    if isinstance(apply, bool):
        return ApplyOptions() if apply else None
    return apply


class AdapterClient:
    """Opened when it is needed; one that was given is never closed here.

    Args:
        adapter: Name of the adapter, for errors.
        server: Address, or a client.
        options: For a client that is made here.
        on_error: See the adapters.
        logger: Of the adapter.

    Raises:
        ClientError: REQUEST_INVALID; an argument cannot be.
        TypeError: There is no such option.
    """

    def __init__(
        self,
        adapter: str,
        server: Client | str,
        options: ClientOptions,
        on_error: Literal["raise", "log"],
        logger: Logger,
    ) -> None:
        check_options(adapter, options, ClientOptions)
        if isinstance(server, Client) and options:
            raise invalid(
                f"{', '.join(options)} would be for a new client, but one is given; make that with "
                "these options, or give its address",
            )
        if on_error not in ("raise", "log"):
            raise invalid(f"on_error is {on_error!r}; use 'raise' or 'log'")
        self._server = server if isinstance(server, Client) else text("server", server)
        self._options: dict[str, Any] = {**options}
        self._raises = on_error == "raise"
        self._logger = logger
        self._client: Client | None = None

    def open(self) -> Client:
        """Return the client, open."""
        if self._client is None:
            server = self._server
            self._client = server if isinstance(server, Client) else Client(server, **self._options)
        return self._client

    def close(self) -> None:
        """Close it, unless it was given."""
        client, self._client = self._client, None
        if client is not None and client is not self._server:
            client.close()

    def handle(self, when: str, error: ClientError) -> None:
        """Raise or log an error that is being handled, whichever was asked for."""
        if self._raises:
            raise error
        notes = getattr(error, "__notes__", ())
        sentence = "; ".join([error.message, *notes])
        self._logger.warning("training continues after an error %s: %s", when, sentence)


class SyncPush:
    """Pushes tensors that can be read only once, sync after sync, and applies them if asked.

    Each call makes a new version. The pushes have no key in common with those of a run before:
    where one stood for other weights, the tensors would have to be pushed again, and cannot be.
    """

    def __init__(
        self,
        client: AdapterClient,
        apply: bool | ApplyOptions,  # noqa: FBT001 - as users give it
        push: PushOptions | None,
        run_id: str,
        logger: Logger,
    ) -> None:
        self._client, self._logger = client, logger
        pushing = PushOptions(**{**(push or {}), "collective": True})
        self.options = StepOptions(pushing, apply_options(apply))
        self._run_id = text("run_id", run_id) or uuid.uuid4().hex
        self._count = 0
        #: The last one that succeeded.
        self.last: PushedStep | None = None

    @property
    def name(self) -> str:
        """What the sync is that was begun last, for an error."""
        return f"sync {self._count}"

    def push(self, tensors: Iterable[tuple[str, object]], *, of_run: bool) -> PushedStep:
        """Push the next sync; the metadata of its version names the run where it is `of_run`.

        Raises a ClientError of the push or the apply; a note says so if the version exists.
        """
        self._count += 1
        labels = {"run_id": self._run_id} if of_run else {}
        labels["sync"] = str(self._count)
        client = self._client.open()
        push = functools.partial(client.push, tensors, **_with_metadata(self.options, labels))
        applying = self.options.apply

        def apply(pushed: PushResult) -> tuple[PushResult, ApplyReport]:
            return pushed, client.apply(pushed.version, **(applying or {}))

        done = _measured(push, None if applying is None else apply, self.name)
        self.last = done
        values = ", ".join(f"{key} {value:g}" for key, value in done.metrics().items())
        self._logger.info("%s: %s", self.name, values)
        return done
