"""Every knob of the client: small frozen dataclasses, units in the names."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypedDict

from weightsync.backoff import backoff_s
from weightsync_client.types import CacheMode, EngineOrder, FleetOrder, PauseMode

if TYPE_CHECKING:
    from weightsync.v1 import weightsync_pb2 as pb
    from weightsync_client.gate import Gate

#: Where weightsync-server listens by default.
DEFAULT_ADDRESS = "127.0.0.1:50551"

#: Bytes per chunk. Measured: 512 KiB costs 15 % of the speed, more than 1 MiB gains little.
CHUNK_BYTES = 1 << 20

#: Bytes at which tensors are cut into shards; a larger tensor gets a shard of its own.
SHARD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Longest time of each kind of call. No call goes without one.

    Attributes:
        call_s: Calls that only read or note something.
        begin_s: Opening a push; the server waits this long for a free slot.
        stream_s: One stream of bytes, up or down.
        commit_s: Commit of a push: until every shard is verified and durable.
        apply_s: An apply or a rollback, all phases. One that outlasts it goes on in the server.
        watch_s: One connection of a watch; it is renewed without the caller noticing.
        train_s: A job of the supervised trainer, and a checkpoint, which waits for one.
    """

    call_s: float = 30
    begin_s: float = 300
    stream_s: float = 3600
    commit_s: float = 600
    apply_s: float = 900
    watch_s: float = 3600
    train_s: float = 86400


@dataclass(frozen=True, slots=True)
class Retry:
    """How long a cut link is taken up again: exponential backoff with full jitter.

    Attributes:
        attempts: Failures in a row without a byte of progress before the error is raised.
        initial_s: Longest first pause.
        max_s: Longest pause, but where the server asks for a longer one.
    """

    attempts: int = 8
    initial_s: float = 0.1
    max_s: float = 5.0

    def delay_s(self, failures: int, asked_s: float | None = None) -> float:
        """Return the pause after so many failures in a row, counted from 1.

        Args:
            failures: How many.
            asked_s: The least that the server asked for; the pauses grow nevertheless, so that what
                takes longer than it thought is not given up after a few of them.
        """
        return max(backoff_s(failures, self.initial_s, self.max_s, jitter=0.9), asked_s or 0.0)


class PushedProbes(Protocol):
    """What a push takes as its probes: `Probes`, which alone is accepted."""

    def to_message(self) -> pb.Probes:
        """Return them as a push sends them."""


class PushOptions(TypedDict, total=False):
    """Keyword options of `push` and `push_async`.

    Attributes:
        version: 1 to 2^53-1, above the newest one; 0 (default): the server assigns the next.
        epoch: The writer's epoch from `acquire_epoch`; 0 (default): the newest at this moment,
            unless another run took it and pushed under it.
        metadata: Text kept with the version, such as step and run_id; at most 64 entries. Numbers
            are kept as the text that `str` makes of them.
        streams: Streams that send at the same time, each on a connection of its own. Default 1,
            which is fastest on one host: the work is bound by the processor. Where the server has
            ingest processes, at least one to each, except from an iterable.
        shard_bytes: Where tensors are cut into shards; default 256 MiB. Files are sent as they are,
            and of what several processes push each of four has so much of a shard.
        chunk_bytes: Bytes per message, at most what the server accepts; default 1 MiB.
        idempotency_key: Made for each push by default. A push that is repeated with the key of an
            unfinished one goes on where that stopped; with the key of a committed one it sends
            nothing: the source is digested (an iterable is read to its end), and the answer is that
            version, or VERSION_CONFLICT where it has other content. Use a key once per content.
        on_progress: Called from sending threads with bytes sent and bytes in all (0: not known).
        delta: "auto" (default): send what changed since this client's last version where that is
            less, which needs memory for one copy of the model; "never": send all and keep no copy;
            "require": an error in place of a push in full; not with `writers`, each of which sends
            what it can.
        compress: Whether deltas are packed with zstd: "auto" (default): where the link is slow,
            "always" or "never".
        partial: True: the tensors that the source lacks stay what they are in the base. What is
            pushed of the others is what changed, where this client holds a copy of the base, else
            all of each that has another digest. The result is a version like any other, whose
            content digest is that of all tensors; `PushResult.base_version` is the base.
            Several processes push the same tensors, each its part; those are sent whole.
        base: For a partial push: the version that it is based on; 0 (default): the last one that
            this client has committed, else the live one. Of several processes all name the same,
            else the push fails for all; those without one take that of the others.
        collective: True: other ranks take part in each step of the iterable that is pushed, as in a
            gather of one tensor after the other. It is read to its end even where the push fails,
            so that no rank waits for this one, and the error is raised then. So are the sources
            of vLLM's trainers (`WeightSource`) by themselves.
        writers: How many processes call push for this version, each with what it has of it: parts
            of tensors (DTensors, flat parameters of FSDP1 and ZeRO-3, `ShardedTensor`), or whole
            ones, which are replicas then and compared. Default: those of torch.distributed for
            parts and with `step`, else one. All of them get the same version or, within the
            server's `push_writer_timeout_s`, an error that names the process at fault.
        writer: Which of them this is, from 0; default: the rank.
        step: The step of the training, by which the processes of one run of torch.distributed find
            each other: every one of them calls push, and each step is pushed once. Elsewhere
            `idempotency_key` takes its place.
        dtype: "auto" (default): float16, bfloat16, float32 and float64 are cast to whichever of
            these the engine has the tensor in, piece by piece as it is sent; `PushResult.cast` says
            of how many. A finite value that would become infinite is refused by name. What the
            engine does not have, or before an engine is there, goes as it is. "exact": what would
            be cast is refused; "keep": all goes as it is.
        check_finite: True: NaN and infinity are refused by the name of the tensor, whatever it is
            sent as. Default False.
        same_host: "auto" (default): where the server runs on this host and offers it, tensors are
            written into its memory, which is several times as fast, and those on a GPU are copied
            by the server; "write": they are written, too, so that the server compares digests that
            were computed here (`Version.trainer_verified`); "never": always send them.
        probes: `Probes`: sequences and the trainer's log probabilities of their tokens, which the
            gate of an apply scores on the engine (`Gate`); kept with the version. Of several
            processes that push, writer 0 alone sends them.
    """

    version: int
    epoch: int
    metadata: Mapping[str, str | float]
    streams: int
    shard_bytes: int
    chunk_bytes: int
    idempotency_key: str
    on_progress: Callable[[int, int], None]
    delta: str
    compress: str
    partial: bool
    base: int
    collective: bool
    writers: int
    writer: int
    step: int
    dtype: str
    check_finite: bool
    same_host: str
    probes: PushedProbes


class PauseChoices(TypedDict, total=False):
    """How generation is paused.

    Attributes:
        pause: What happens to requests in flight: "keep" (default), "wait" or "abort"; or
            "between_steps": nothing pauses, the ranks change the weights between two steps.
        cache: Which keys that were computed under the old weights are read afterwards:
            "recompute": none, requests in flight compute theirs again (default, exact); "keep":
            those of a request in flight, by itself (shortest gap, default with "between_steps");
            "share": all, by every request, also by later ones.
        wait_timeout_s: For "wait": how long to wait for requests to finish; server default 30.
        after_wait: For "wait": what to do then, "keep" (default) or "abort".
        idempotency_key: Made for each call by default. A call with the key of another joins it,
            or gets its answer; so it is asked again by itself while the link is away.
        timeout_s: Instead of `Timeouts.apply_s`.
    """

    pause: PauseMode | str
    cache: CacheMode | str
    wait_timeout_s: float
    after_wait: PauseMode | str
    idempotency_key: str
    timeout_s: float


class EngineChoices(TypedDict, total=False):
    """Which engines beside the server take the version, and in which order.

    Attributes:
        engine: Name of one, as `weightsync status` shows it; default: all of the host. Those that
            are away take no part and join at the host's version before they serve.
        order: "together" (default): all are paused until all are proved, so that none serves the
            version beside one that serves the version before; if one fails, all go back. "rolling":
            one after the other while the others generate; the first failure stops it and restores
            those that went before; the server needs 3 slots.
        max_unavailable: With "rolling": engines that may be away at once; server default 1.
    """

    engine: str
    order: EngineOrder | str
    max_unavailable: int


class RollbackOptions(PauseChoices, EngineChoices, total=False):
    """Keyword options of `rollback`: those of `PauseChoices` and `EngineChoices`."""


class FleetChoices(PauseChoices, total=False):
    """Keyword options of `fleet_apply` and `fleet_rollback`, besides those of `PauseChoices`.

    All members pause in the same way; one that cannot refuses the apply before any has. A barrier
    takes no "between_steps", and waits for requests at most a quarter of the server's
    `undecided_limit_s`.

    Attributes:
        order: "rolling" (default): wave by wave, while the others generate; a wave that fails stops
            it, and those that went before go back. "barrier": all are paused until one decision.
        max_unavailable: With "rolling": members away at once; default: as the server is set.
    """

    order: FleetOrder | str
    max_unavailable: int


class FleetApplyOptions(FleetChoices, total=False):
    """Keyword options of `fleet_apply`, besides those of `FleetChoices`.

    Attributes:
        clear_rejected: True: content that a rollback of the fleet rejected is accepted again, on
            every member, if this is committed; needs the admin role.
    """

    clear_rejected: bool


class ApplyOptions(PauseChoices, EngineChoices, total=False):
    """Keyword options of `apply`, besides those of `PauseChoices` and `EngineChoices`.

    Attributes:
        dry_run: Check and plan everything, change nothing.
        require_durable: False: a staged version may be applied before it is durable.
        clear_rejected: True: a rejected or held version is accepted again; needs the admin role.
        prepare_timeout_s: Longest preparation; server default 300.
        gate: Whether the version's probes are scored, and what a bad score means; default `Gate()`.
    """

    dry_run: bool
    require_durable: bool
    clear_rejected: bool
    prepare_timeout_s: float
    gate: Gate


def check_options(method: str, options: Mapping[str, object], kind: type[object]) -> None:
    """Refuse options that a method does not have, as Python does: a misspelt one changes nothing.

    Raises:
        TypeError: Naming the first of them, and the option that was meant, where one is near.
    """
    # Those of a TypedDict, with what it inherits.
    known = kind.__annotations__
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, sorted(known), 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}{hint}")
