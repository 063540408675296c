"""A callback of transformers' Trainer: the model is a version after every so many steps."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Iterable
from typing import Any, Literal, TypeVar, Unpack

from transformers import TrainerCallback

from weightsync_client.client import Client
from weightsync_client.errors import ClientError
from weightsync_client.integrations.step_push import (
    AdapterClient,
    ClientOptions,
    PushedStep,
    StepOptions,
    apply_options,
    push_part,
    push_step,
)
from weightsync_client.options import (
    DEFAULT_ADDRESS,
    ApplyOptions,
    PushOptions,
)
from weightsync_client.rpc.validate import text, whole_number
from weightsync_client.source.flat_parameters import TrainerRanks, holds_parts

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: In `trainer_state.json`, beside the states of callbacks. It is the name of no class, so that
#: `restore_callback_states_from_checkpoint` does not take it for arguments to make a callback of.
_STATE = "weightsync"

#: Of values that are summed up between two logs; of all others the last one counts.
_SUMMED = ("_seconds", "_bytes", "_steps")


# follow_imports = "skip": transformers' types are Any here.
class WeightSyncCallback(TrainerCallback):  # type: ignore[misc]
    """Pushes the model after every `every` optimizer steps and at the end of training.

    When a step's push returns, the version is committed and verified; with `apply` the engine
    serves it then. Training waits for both. Where every process has the whole model, only the main
    one pushes. Where each has parts of it, as with FSDP or tensor parallel, each pushes its own
    with a client of its own, nothing is gathered, and the main one applies; an error of one is
    raised, or logged, on all.

    A run that is resumed from a checkpoint and repeats a step with the same weights makes no second
    version of it: the run's name is kept in its checkpoints. Steps with other weights than before,
    and with `apply` those before the live one, become new versions, as does every push of a model
    in parts. With `load_best_model_at_end` the version at the end is that of the best step.

    Versions and seconds are in the Trainer's next log and its history. Reporters of `report_to` are
    called before other callbacks; `add_to` has them see the values as well.

    Args:
        server: Address of weightsync-server, for a client that is opened when training begins and
            closed when it ends; or a client, which stays open.
        every: Optimizer steps between two pushes.
        apply: True: apply each version; or with which options.
        push: Options of the push; its metadata is kept in addition to `run_id` and `step`, and
            should not change when a run is resumed.
        probes: Sequences of token ids, 1 to 64 of 2 to 512, which each version brings along with
            the log probabilities that the model computes for them (`Probes.of`), and which the gate
            of an apply scores.
        on_error: "raise" (default): an error of a push or an apply ends the training; "log": it is
            logged as a warning, and the training goes on.
        run_id: Name of the training run; default: a new one, kept in checkpoints.
        **options: `model`, `timeouts`, `retry` and `access` (token and TLS), as of `Client`.

    Raises:
        ClientError: REQUEST_INVALID; an argument cannot be. While training, see `Client.push` and
            `Client.apply`; when it begins, if no server answers.
        TypeError: There is no such option.
    """

    def __init__(
        self,
        server: Client | str = DEFAULT_ADDRESS,
        *,
        every: int = 1,
        apply: bool | ApplyOptions = False,
        push: PushOptions | None = None,
        probes: Iterable[Any] | None = None,
        on_error: Literal["raise", "log"] = "raise",
        run_id: str = "",
        **options: Unpack[ClientOptions],
    ) -> None:
        self._client = AdapterClient("WeightSyncCallback", server, options, on_error, logger)
        self._every = whole_number("every", every, 1)
        self._step_options = StepOptions(push or PushOptions(), apply_options(apply), probes)
        self._given_run_id = text("run_id", run_id)
        self._run_id = ""
        self._ranks: TrainerRanks | None = None
        self._pushed_step = 0
        self._metrics: dict[str, float] = {}

    def add_to(self, trainer: Any) -> None:
        """Add this callback in front of all others of a trainer, its reporters included."""
        callbacks = trainer.callback_handler.callbacks
        callbacks[:] = [self, *(callback for callback in callbacks if callback is not self)]

    # Called by the Trainer.

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Open the client, and find a wrong address or token before the first step."""
        del args, control, kwargs
        self._ranks = TrainerRanks() if model is not None and holds_parts(model) else None
        if not self._pushes(state):
            return
        self._client.close()  # Of a training that an error has ended.
        kept = state.stateful_callbacks.get(_STATE, {})
        self._run_id = self._given_run_id or kept.get("run_id") or uuid.uuid4().hex
        if self._ranks is not None:
            self._run_id = self._ranks.agree(self._run_id)
        state.stateful_callbacks[_STATE] = {"run_id": self._run_id}
        self._pushed_step, self._metrics = 0, {}
        try:
            self._on_all(lambda: self._client.open().status())
        except ClientError as error:
            self._failed("as it begins", error)

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Push the model if it is its turn, which the last step always is."""
        del args, control, kwargs
        step = state.global_step
        # The last one here, and not only at the end, because no log comes after the end.
        due = step % self._every == 0 or 0 < state.max_steps <= step
        if self._pushes(state) and due:
            self._push(step, model)

    def on_log(
        self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any
    ) -> None:
        """Put what was pushed since the last log into this one and into the history."""
        del args, control, kwargs
        if not state.is_world_process_zero or logs is None or not self._metrics:
            return
        logs.update(self._metrics)
        if state.log_history:
            # The Trainer has made this entry of the same values just before.
            state.log_history[-1].update(self._metrics)
        self._metrics = {}

    def on_train_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Push the model that training leaves, unless it was pushed last; close the client."""
        del control, kwargs
        if not self._pushes(state):
            return
        step = state.global_step
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            step = state.best_global_step  # The Trainer has just loaded it.
        if self._ranks is not None:
            # Each looks for its checkpoint by itself, and may not see the folder.
            step = self._ranks.agree(step)
        try:
            if step != self._pushed_step:
                self._push(step, model)
        finally:
            self._client.close()

    # Inside.

    def _pushes(self, state: Any) -> bool:
        return self._ranks is not None or bool(state.is_world_process_zero)

    def _on_all(self, call: Callable[[], T]) -> T:
        return call() if self._ranks is None else self._ranks.together(call)

    def _push(self, step: int, model: Any) -> None:
        try:
            pushed = self._push_step(step, model)
        except ClientError as error:
            self._count({"weightsync/failed_steps": 1})
            self._failed(f"at step {step}", error)
        else:
            self._pushed_step = step
            self._count(pushed.metrics())

    def _push_step(self, step: int, model: Any) -> PushedStep:
        client = self._on_all(self._client.open)
        if self._ranks is None:
            return push_step(client, model, step, self._run_id, self._step_options)
        return push_part(client, model, step, self._run_id, self._step_options, self._ranks)

    def _count(self, metrics: dict[str, float]) -> None:
        for name, value in metrics.items():
            before = self._metrics.get(name, 0) if name.endswith(_SUMMED) else 0
            self._metrics[name] = before + value

    def _failed(self, when: str, error: ClientError) -> None:
        try:
            self._client.handle(when, error)
        except ClientError:
            self._client.close()
            raise
