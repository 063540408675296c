"""When versions are staged on each host, as its server says."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping

from weightsync_client import Client, Durability, Residency

__all__ = ["Arrivals", "arrivals"]


class Arrivals:
    """Notes the first moment at which a host has a version committed and staged.

    Args:
        clients: Of the hosts' servers, by name; each is watched by a thread of its own until its
            client is closed.
    """

    def __init__(self, clients: Mapping[str, Client]) -> None:
        self._seen: dict[tuple[str, int], float] = {}
        self._news = threading.Condition()
        self._names = tuple(clients)
        for name, client in clients.items():
            threading.Thread(target=self._watch, args=(name, client), daemon=True).start()

    def everywhere(self, version: int, timeout_s: float) -> float:
        """Return when the last host had it, monotonic seconds.

        Raises:
            TimeoutError: One does not have it in time.
        """
        wanted = {(name, version) for name in self._names}
        with self._news:
            if not self._news.wait_for(lambda: wanted <= self._seen.keys(), timeout_s):
                late = sorted(name for name, _ in wanted - self._seen.keys())
                msg = f"version {version} was not staged on {', '.join(late)} in {timeout_s:g} s"
                raise TimeoutError(msg)
            return max(self._seen[one] for one in wanted)

    def _watch(self, name: str, client: Client) -> None:
        for change in client.watch():
            version = change.version
            here = (version.durability, version.residency)
            if here == (Durability.COMMITTED, Residency.STAGED) and not change.deleted:
                with self._news:
                    self._seen.setdefault((name, version.version), time.monotonic())
                    self._news.notify_all()


@contextlib.contextmanager
def arrivals(addresses: Mapping[str, str]) -> Iterator[Arrivals]:
    """Watch servers at addresses, by name, until the block ends."""
    with contextlib.ExitStack() as stack:
        clients = {
            name: stack.enter_context(Client(address)) for name, address in addresses.items()
        }
        yield Arrivals(clients)
