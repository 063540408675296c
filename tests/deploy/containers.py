"""Runs services of the compose file as Docker would, with the kernel's namespaces and no engine.

Each service is its own first process in new mount, ipc and pid namespaces, under its own uid, in a
root that holds the system, the installed software and the declared volumes, all else absent. The
services share one network namespace, where their names lead to 127.0.0.1: a compose network.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tests.deploy.compose_file import ROOT, Service, folders_of_images

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Container", "Stack"]

_CLONE_NEWNET = 0x40000000
_INIT = Path(__file__).with_name("container_init.py")
# Holds the network namespace with its loopback up (SIOCSIFFLAGS) until its input ends.
_NETWORK = """
import ctypes, fcntl, socket, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
if libc.unshare(0x40000000):
    sys.exit("unshare: errno %d" % ctypes.get_errno())
with socket.socket() as sock:
    fcntl.ioctl(sock, 0x8914, struct.pack("16sh", b"lo", 0x41))
print("up", flush=True)
sys.stdin.read()
"""


def software() -> list[str]:
    """Return the folders that stand for what the images install, beside /usr."""
    paths = {str(ROOT), sys.prefix, sys.base_prefix}
    outside = {path for path in paths if not path.startswith("/usr/")}
    return sorted(p for p in outside if not any(p.startswith(f"{o}/") for o in outside))


class Container:
    """One running service."""

    def __init__(self, stack: Stack, service: Service) -> None:
        self.service = service
        self.log_path = stack.folder / f"{service.name}.log"
        self._environment = {
            "PATH": f"{sys.prefix}/bin:/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            "HOME": "/",
            **service.environment,
        }
        root = stack.folder / "roots" / service.name
        root.mkdir(parents=True)
        spec = {
            "root": str(root),
            "argv": service.argv,
            "environment": self._environment,
            "uid": service.uid,
            "gid": service.gid,
            "tmpfs": service.tmpfs,
            "read_only": service.read_only,
            "shm_bytes": service.shm_bytes,
            "software": software(),
            "mounts": [
                (stack.source(service, mount.source, mount.target), mount.target, mount.read_only)
                for mount in service.mounts
            ],
            "hosts": str(stack.hosts),
        }
        namespaces = ["--mount", "--ipc", "--pid", "--propagation", "private"]
        command = [
            # Nothing outlives the tests, even if they are killed.
            "setpriv", "--pdeathsig", "KILL", "nsenter", f"--net=/proc/{stack.network_pid}/ns/net",
            "unshare", *namespaces, "--fork", "--kill-child",
            sys.executable, "-I", str(_INIT), json.dumps(spec),
        ]  # fmt: skip
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        self.pid = self._first_process()

    def _first_process(self) -> int:
        children = Path(f"/proc/{self._process.pid}/task/{self._process.pid}/children")
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline and self._process.poll() is None:
            with contextlib.suppress(FileNotFoundError):
                if pids := children.read_text().split():
                    return int(pids[0])
            time.sleep(0.01)
        raise RuntimeError(f"{self.service.name} did not start:\n{self.log()}")

    def log(self) -> str:
        """Return the end of what it printed."""
        return self.log_path.read_text(errors="replace")[-6000:]

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def run(self, *command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """Run a command inside it as its user, as `docker exec` does."""
        target = [
            "nsenter", "--target", str(self.pid), "--mount", "--ipc", "--pid", "--net", "--root",
            "--wd", "--setgid", str(self.service.gid), "--setuid", str(self.service.uid),
        ]  # fmt: skip
        environment = [f"{name}={value}" for name, value in self._environment.items()]
        return subprocess.run(
            [*target, "/usr/bin/env", "-i", *environment, *command],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def wait_log(self, text: str, timeout_s: float) -> None:
        """Return when it has printed `text`."""
        deadline = time.monotonic() + timeout_s
        while self.running and time.monotonic() < deadline:
            if text in self.log_path.read_text(errors="replace"):
                return
            time.sleep(0.5)
        raise RuntimeError(f"{self.service.name} did not print {text!r}:\n{self.log()}")

    def wait_healthy(self, timeout_s: float) -> None:
        """Return when its own healthcheck succeeds."""
        deadline = time.monotonic() + timeout_s
        answer = "not asked"
        while self.running and time.monotonic() < deadline:
            ran = self.run(*self.service.healthcheck)
            if ran.returncode == 0:
                return
            answer = f"{ran.returncode} {ran.stdout}{ran.stderr}"
            # Each try starts a Python, which the service's own start has to wait for.
            time.sleep(2)
        raise RuntimeError(f"{self.service.name} is not healthy: {answer}\nits log:\n{self.log()}")

    def stop(self) -> int:
        """Ask it to end, as `docker stop` does, and return its exit status."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)
        return self._process.wait(self.service.stop_grace_s)

    def kill(self) -> None:
        """End it at once; with the first process goes everything in its pid namespace."""
        if self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
        self._process.wait(30)


class Stack:
    """The services that were started, their volumes and their network; a context manager.

    Args:
        services: What the compose file says.
    """

    def __init__(self, services: dict[str, Service]) -> None:
        self.services = services
        self.containers: dict[str, Container] = {}
        # Short: a unix socket's path has at most 107 bytes.
        self.folder = Path(tempfile.mkdtemp(prefix="ws", dir="/tmp"))
        self.hosts = self.folder / "hosts"
        names = " ".join(["localhost", *services])
        self.hosts.write_text(f"127.0.0.1 {names}\n")
        self._network = subprocess.Popen(
            [sys.executable, "-I", "-c", _NETWORK],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._network.stdout is not None
        if self._network.stdout.readline() != "up\n":
            raise RuntimeError("a network namespace could not be made")
        self.network_pid = self._network.pid
        # Sockets made by this thread belong to the services' network.
        self._inside = ThreadPoolExecutor(1, initializer=self._enter_network)

    def _enter_network(self) -> None:
        assert threading.current_thread() is not threading.main_thread()
        with Path(f"/proc/{self.network_pid}/ns/net").open("rb") as handle:
            if ctypes.CDLL(None).setns(handle.fileno(), _CLONE_NEWNET):
                raise OSError("setns was refused")

    def start(self, name: str) -> Container:
        """Start a service; those that it depends on must run."""
        for other in self.services[name].raw.get("depends_on", {}):
            assert self.containers[other].running
        self.containers[name] = Container(self, self.services[name])
        return self.containers[name]

    def volume(self, name: str) -> Path:
        """Return the folder of a named volume."""
        return self.folder / "volumes" / name

    def source(self, service: Service, source: str, target: str) -> str:
        """Return the host's path of a volume; a named one is made as Docker makes it."""
        if source.startswith("/"):
            return source
        folder = self.volume(source)
        if not folder.exists():
            mode, uid, gid = folders_of_images().get(target, (0o755, service.uid, service.gid))
            folder.mkdir(parents=True)
            os.chown(folder, uid, gid)
            folder.chmod(mode)
        return str(folder)

    def get(self, url: str) -> str:
        """Return what an HTTP server in the services' network answers."""

        def read() -> str:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return bytes(answer.read()).decode()

        return self._inside.submit(read).result()

    def __enter__(self) -> Self:
        """Return self."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: BaseException | None, __: TracebackType | None
    ) -> None:
        """End everything and leave nothing."""
        for container in self.containers.values():
            container.kill()
        self._inside.shutdown()
        self._network.communicate()
        shutil.rmtree(self.folder)
