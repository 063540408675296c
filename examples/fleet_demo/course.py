"""What happens, step by step: pushes, fleet-wide applies, a host that dies and returns."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from examples.demo.processes import Processes, ProcessesError
from examples.fleet_demo.hosts import LEASE_S, Follower, Origin
from examples.fleet_demo.table import View
from examples.fleet_demo.trainer import Trainer
from examples.fleet_demo.watcher import AWAY, Seen, Watcher
from weightsync_client import Client

__all__ = ["Course", "Plan", "Shown"]

_SERVING = "serving"
_ORDERS = ("rolling", "barrier")


@dataclass(frozen=True)
class Plan:
    """How many versions there are, and when the last follower is away.

    Attributes:
        versions: How many are pushed, 3 or more.
        every_s: From one push to the next, at least.
    """

    versions: int
    every_s: float

    @property
    def killed_after(self) -> int:
        """The last of them that is applied before the follower is killed."""
        return max(1, self.versions // 3)

    @property
    def back_after(self) -> int:
        """The last of them that is applied before it is started again."""
        return max(self.killed_after + 1, self.versions * 2 // 3)


@dataclass(frozen=True)
class Shown:
    """What was shown.

    Attributes:
        orders: How each version was applied, in their order.
        killed: Name of the follower that was killed.
        killed_on: The version that it served then.
        back_on: The version that was decided when it was started again, and that it then served.
        back_s: From its start until it served.
        decided: The version that was decided last, and that all followers were proved to hold.
    """

    orders: tuple[str, ...]
    killed: str
    killed_on: int
    back_on: int
    back_s: float
    decided: int


class Course:
    """Starts the hosts and runs the steps over them.

    Args:
        plan: What to do.
        processes: All that run; one that ends by itself ends the demo.
        origin: Takes the pushes.
        followers: The last of them is killed.
        watcher: Of all hosts.
        view: Shows what happens.
        deadline: Monotonic; what is not done then has failed.
    """

    def __init__(
        self,
        plan: Plan,
        processes: Processes,
        origin: Origin,
        followers: Sequence[Follower],
        watcher: Watcher,
        view: View,
        deadline: float,
    ) -> None:
        self._plan = plan
        self._processes = processes
        self._origin = origin
        self._followers = followers
        self._watcher = watcher
        self._view = view
        self._deadline = deadline

    def run(self, trainer: Trainer) -> Shown:
        """Start the hosts, push and apply every version, and return what that has shown.

        Raises:
            ProcessesError: A process failed, or a follower did not come to what was decided.
            ClientError: The origin refused a push, or a follower did not answer.
        """
        self._origin.start()
        self._wait(lambda: self._seen(self._origin).state != AWAY, self._origin.name)
        with Client(self._origin.address) as client:
            self._start_followers(trainer, client)
            return self._run(trainer, client)

    def _start_followers(self, trainer: Trainer, client: Client) -> None:
        # The engines' checkpoint: pushed first, it has the same number on every host.
        self._push(trainer, client)
        for follower in self._followers:
            follower.start()
        self._view.say("the followers start: each serves once it has read what is decided")
        self._wait(lambda: self._members() == len(self._followers), "the fleet")

    def _run(self, trainer: Trainer, client: Client) -> Shown:
        victim, orders = self._followers[-1], []
        killed_on = back_on = version = 0
        back_s = 0.0
        for number in range(1, self._plan.versions + 1):
            begun = time.monotonic()
            trainer.step()
            version = self._push(trainer, client)
            orders.append(_ORDERS[(number - 1) % len(_ORDERS)])
            self._apply(version, orders[-1])
            if number == self._plan.killed_after:
                killed_on = self._kill(victim)
            elif number == self._plan.back_after:
                back_on, back_s = version, self._start_again(victim, version)
            self._sleep(begun + self._plan.every_s)
        self._view.say("prove what each follower holds, from the parameters of its ranks")
        for follower in self._followers:
            self._prove(follower, version)
        return Shown(tuple(orders), victim.name, killed_on, back_on, back_s, version)

    def _push(self, trainer: Trainer, client: Client) -> int:
        pushed = trainer.push(client)
        self._view.say(
            f"the trainer pushed version {pushed.version} "
            f"({pushed.sent_bytes / 1e3:.0f} kB, {pushed.kind}) to {self._origin.name}"
        )
        return pushed.version

    def _apply(self, version: int, order: str) -> None:
        words = ["fleet", "apply", str(version), "--order", order]
        self._view.say(f"$ weightsync {' '.join(words)}")
        address = ["--address", self._followers[0].address]
        command = [sys.executable, "-m", "weightsync_client.cli", *words, *address]
        process = self._processes.start("weightsync", command, piped=True)
        self._wait(lambda: process.poll() is not None, f"version {version} on the fleet")
        assert process.stdout is not None
        for line in process.stdout:
            self._view.say(line.decode().rstrip())

    def _kill(self, victim: Follower) -> int:
        live = self._seen(victim).live
        victim.kill()
        self._view.say(f"{victim.name} is killed; the fleet misses it after {LEASE_S} s")
        others = len(self._followers) - 1
        self._wait(lambda: self._members() == others, f"a fleet of {others} members")
        return live

    def _start_again(self, victim: Follower, decided: int) -> float:
        self._view.say(f"{victim.name} is started again, on the checkpoint of the beginning")
        begun = time.monotonic()
        victim.start()
        self._wait(lambda: self._serves(victim, decided), f"{victim.name} with version {decided}")
        taken_s = time.monotonic() - begun
        self._view.say(f"{victim.name} serves version {decided} after {taken_s:.1f} s")
        return taken_s

    def _prove(self, follower: Follower, version: int) -> None:
        self._wait(lambda: self._serves(follower, version), f"{follower.name} at the end")
        with Client(follower.address) as client:
            proof = client.verify()
        if not proof.verified or proof.version != version:
            raise ProcessesError(
                f"{follower.name} holds version {proof.version}, "
                f"{'proved' if proof.verified else 'NOT PROVED'}; version {version} is decided"
            )

    def _members(self) -> int:
        """Return how many followers serve, where all that do see as many members; else 0."""
        seen = [self._seen(follower) for follower in self._followers]
        serving = [one for one in seen if one.state == _SERVING]
        return len(serving) if all(one.members == len(serving) for one in serving) else 0

    def _serves(self, follower: Follower, version: int) -> bool:
        seen = self._seen(follower)
        return (seen.state, seen.live, seen.decided) == (_SERVING, version, version)

    def _seen(self, host: Follower | Origin) -> Seen:
        return self._watcher.seen[host.name]

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        self._processes.wait(ready, what, self._deadline)

    def _sleep(self, until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            self._processes.check()
            time.sleep(min(left, 0.2))
