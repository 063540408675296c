"""The hook of TRL's AsyncGRPOTrainer: what the trainer sends is pushed, and served then."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Unpack

from weightsync_client.client import Client
from weightsync_client.errors import ClientError
from weightsync_client.integrations.step_push import (
    AdapterClient,
    ClientOptions,
    PushedStep,
    SyncPush,
)
from weightsync_client.options import DEFAULT_ADDRESS, ApplyOptions, PushOptions
from weightsync_client.source.tensor_stream import drained_on_error

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


class WeightSyncTransfer:
    """Has the engine serve what AsyncGRPOTrainer sends: give it as the trainer's `weight_transfer`.

    When a transfer returns, its version is committed and verified, and with `apply` the engine
    serves it. Generation goes on while the weights are sent; it pauses for the exchange only. The
    tensors are read to their end even where the push fails, so that no other rank waits in a
    gather; TRL calls this object on the main process alone, and the others read by themselves.

    TRL leaves out what does not change, such as the vision tower of a model of which it trains the
    text part, and a head that is tied to the embeddings. Then `push={"partial": True}` is needed:
    what is absent stays what it is in the version before, at first the live one. Where that is not
    what training began with, as after another run, `"base"` has to name a version that is. A PEFT
    model is sent in full, with its adapters merged.

    TRL trains in float32 by default. Each tensor is cast to the dtype of the server's engine, once
    that is proved. To a server without one (`--engine none`) it is sent as it is: train in the
    checkpoint's dtype for that, `AsyncGRPOConfig(dtype="bfloat16")`.

    TRL gives neither the step nor what is sent again, so each transfer is a new version. Its
    metadata is `run_id` and `sync`, the number of the transfer: 1 is the one as training begins;
    with `weight_sync_steps=n`, sync k comes after (k - 1) * n steps of a run that was not resumed.

    TRL 1.16 has this hook, as `trl.experimental.async_grpo`'s `WeightTransferProtocol`.

    Args:
        server: Address of weightsync-server, for a client that is opened when training begins and
            closed when it ends; or a client, which stays open.
        apply: True (default): apply each version; or with which options; False: only push it.
        push: Options of the push; its metadata is kept in addition.
        on_error: "raise" (default): an error of a push or an apply ends the training; "log": it is
            logged as a warning, and the training goes on while the engine serves what it served.
            TRL counts such a transfer all the same: its samples then are older than it says.
        run_id: Name of the training run; default: a new one.
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
        apply: bool | ApplyOptions = True,
        push: PushOptions | None = None,
        on_error: Literal["raise", "log"] = "raise",
        run_id: str = "",
        **options: Unpack[ClientOptions],
    ) -> None:
        self._client = AdapterClient("WeightSyncTransfer", server, options, on_error, logger)
        self._syncs = SyncPush(self._client, apply, push, run_id, logger)

    @property
    def last(self) -> PushedStep | None:
        """Return the last transfer that succeeded: its version, and how long it took."""
        return self._syncs.last

    # Called by AsyncGRPOTrainer, on the main process.

    def init_weight_transfer(self) -> None:
        """Open the client, and find a wrong address or token before the first transfer."""
        try:
            self._client.open().status()
        except ClientError as error:
            self._client.handle("as it begins", error)

    def pause(self) -> None:
        """Do nothing: weights are sent while the engine generates, and the apply pauses it."""

    def send_weights(self, iterator: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Push the weights and apply them; the iterator is read to its end, whatever happens.

        Raises:
            ClientError: Of the push or the apply; a note says so if the version exists.
        """
        try:
            # A push that ends before it begins, as where no server answers, has read none of them.
            with drained_on_error(iterator, collective=True):
                self._syncs.push(iterator, of_run=self._of_run())
        except ClientError as error:
            self._client.handle(f"at {self._syncs.name}", error)

    def resume(self) -> None:
        """Do nothing: generation has gone on when the apply was over."""

    def destroy(self) -> None:
        """Close the client, unless it was given."""
        self._client.close()

    # Inside.

    def _of_run(self) -> bool:
        # Its base may be of another run, and the server takes no change of such a version.
        options = self._syncs.options.push
        return not (options.get("partial") and (options.get("base") or self.last is None))
