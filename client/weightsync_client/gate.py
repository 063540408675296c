"""The gate of an apply: when a version's probes are scored, what a bad score means, what it was."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GateWhen(enum.StrEnum):
    """When an apply scores the probes of its version."""

    #: BEFORE where every engine can score in a pause, else AFTER; without probes OFF.
    AUTO = enum.auto()
    OFF = enum.auto()
    #: In the pause, when every rank has proved the version: nobody is served by it before.
    BEFORE = enum.auto()
    #: When the engine generates on it.
    AFTER = enum.auto()
    #: Of a newer server's report.
    UNSPECIFIED = enum.auto()


class GateAction(enum.StrEnum):
    """What becomes of a version that is over a limit, or could not be scored in time."""

    #: The version before is served again, and this content is rejected.
    ROLL_BACK = enum.auto()
    #: The version before is served again, and this version is held (`Serving.HELD`).
    HOLD = enum.auto()
    #: It goes live all the same; the report says why it would not.
    REPORT = enum.auto()


class GateOutcome(enum.StrEnum):
    """How a gate ended."""

    UNSPECIFIED = enum.auto()
    PASSED = enum.auto()
    #: A limit was not kept, and the version went live as it was asked.
    REPORTED = enum.auto()
    ROLLED_BACK = enum.auto()
    HELD = enum.auto()


@dataclass(frozen=True, slots=True)
class Gate:
    """Whether an apply scores the probes of its version, and what a bad score means.

    d is the trainer's log probability of a token less the engine's, and k3 the mean over all tokens
    of exp(-d) - 1 + d. Of several engines one scores for all, the first that takes the version.

    Attributes:
        when: "auto" (default), "off", "before" or "after"; see `GateWhen`.
        on_fail: "roll_back" (default), "hold" or "report"; see `GateAction`.
        k3_limit: Largest k3 from the trainer to the engine; None: 8 times the median of the last 16
            versions that passed, at least 0.001; 0.002 before there are any.
        step_k3_limit: Largest k3 from the version that was live to this one, on the same probes;
            None: none.
        time_limit_s: Longest time for scoring; None: the server's, 5 s.
        each_engine: True: every engine scores.
    """

    when: GateWhen | str = GateWhen.AUTO
    on_fail: GateAction | str = GateAction.ROLL_BACK
    k3_limit: float | None = None
    step_k3_limit: float | None = None
    time_limit_s: float | None = None
    each_engine: bool = False


@dataclass(frozen=True, slots=True)
class GateReport:
    """What scoring the probes of a version has shown on one engine.

    Attributes:
        outcome: How it ended.
        reason: Why a limit was not kept, or why there is no score; empty otherwise.
        version: The version that was scored.
        when: When it was scored.
        probes: Sequences that were scored.
        tokens: Tokens that were compared with those of the trainer.
        nan: Log probabilities of the engine that are no numbers, or infinite.
        k3: From the trainer to the engine, as `Gate` says; 0 if nothing was compared.
        mean_abs: Mean of the absolute difference of log probabilities.
        max_abs: The largest one.
        k3_limit: The limit of k3 that counted; 0: nothing was compared.
        floor_k3: Median k3 of versions that passed, of which the limit was made; 0: none.
        step_k3: From the version that was live; None: that was not scored.
        step_k3_limit: Its limit; 0: none.
        worst_probe: Index of the probe with the largest k3, or of the first with one that is no
            number.
        took_s: Time that scoring took, in the pause with BEFORE.
    """

    outcome: GateOutcome
    reason: str
    version: int
    when: GateWhen
    probes: int
    tokens: int
    nan: int
    k3: float
    mean_abs: float
    max_abs: float
    k3_limit: float
    floor_k3: float
    step_k3: float | None
    step_k3_limit: float
    worst_probe: int
    took_s: float
