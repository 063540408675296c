"""The client of an adapter: its own or a given one, and what becomes of its errors."""

from __future__ import annotations

from logging import Logger
from typing import Any, Literal, TypedDict

from weightsync.errors import Reason
from weightsync_client.access import Access
from weightsync_client.client import Client
from weightsync_client.errors import ClientError, refuse
from weightsync_client.options import ApplyOptions, Retry, Timeouts, check_options
from weightsync_client.rpc.validate import text

__all__ = ["AdapterClient", "ClientOptions", "apply_options"]


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
            raise refuse(
                Reason.REQUEST_INVALID,
                f"{', '.join(options)} would be for a new client, but one is given; make that with "
                "these options, or give its address",
            )
        if on_error not in ("raise", "log"):
            raise refuse(Reason.REQUEST_INVALID, f"on_error is {on_error!r}; use 'raise' or 'log'")
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
        self._logger.warning("training goes on after an error %s: %s", when, sentence)
