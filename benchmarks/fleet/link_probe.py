"""A bare TCP connection over a link, beside which everything else is measured.

Run as a program: `receive PORT` counts what one connection brings and ends, `send HOST PORT BYTES`
sends it, waits until it has arrived, and prints the seconds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time

from benchmarks.fleet.shaped_links import LinkedHost

__all__ = ["link_seconds"]

_PORT = 7001
_PIECE = 1 << 20


def link_seconds(sender: LinkedHost, receiver: LinkedHost, size: int) -> float:
    """Return how long so many bytes take from one host to another."""
    program = [sys.executable, "-m", "benchmarks.fleet.link_probe"]
    receive = [*receiver.on(), *program, "receive", str(_PORT)]
    with subprocess.Popen(receive, stdout=subprocess.PIPE, text=True) as receiving:
        assert receiving.stdout is not None
        receiving.stdout.readline()
        send = [*sender.on(), *program, "send", receiver.name, str(_PORT), str(size)]
        return float(subprocess.run(send, check=True, capture_output=True, text=True).stdout)


def _receive(port: int) -> None:
    with socket.create_server(("", port)) as server:
        print("ready", flush=True)
        connection, _ = server.accept()
        with connection:
            while connection.recv(_PIECE):
                pass


def _send(host: str, port: int, size: int) -> None:
    piece = bytes(_PIECE)
    with socket.create_connection((host, port)) as connection:
        begun = time.monotonic()
        for at in range(0, size, _PIECE):
            connection.sendall(piece[: size - at])
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        print(time.monotonic() - begun)


if __name__ == "__main__":
    if sys.argv[1] == "receive":
        _receive(int(sys.argv[2]))
    else:
        _send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
