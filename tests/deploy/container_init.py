"""Becomes the first process of a container: a root of its own, the declared volumes, a plain user.

Runs as root in fresh mount, ipc and pid namespaces, without any of the project's modules. Its only
argument is a JSON object, see `tests.deploy.containers`.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1
_PR_SET_NO_NEW_PRIVS = 38
_DEVICES = ("null", "zero", "full", "random", "urandom")


def mount(*arguments: str) -> None:
    """Run mount(8)."""
    subprocess.run(["mount", *arguments], check=True)


def bind(source: str, target: Path, *, read_only: bool) -> None:
    """Show `source` at `target`, which is made."""
    if Path(source).is_dir():
        target.mkdir(parents=True, exist_ok=True)
    elif not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch()
    mount("--bind", source, str(target))
    if read_only:
        mount("-o", "remount,ro,bind", str(target))


def build_root(spec: dict[str, Any]) -> Path:
    """Make the root file system: the system read-only, nothing else of the host."""
    root = Path(spec["root"])
    mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(root))
    for name in ("usr", "etc"):
        bind(f"/{name}", root / name, read_only=True)
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        host = Path("/") / name
        if host.is_symlink():
            (root / name).symlink_to(host.readlink())
        elif host.is_dir():
            bind(str(host), root / name, read_only=True)
    for name in ("proc", "sys", "dev", "run", "var"):
        (root / name).mkdir()
    mount("-t", "proc", "proc", str(root / "proc"))
    mount("--rbind", "/sys", str(root / "sys"))
    for name in _DEVICES:
        bind(f"/dev/{name}", root / "dev" / name, read_only=False)
    (root / "dev/fd").symlink_to("/proc/self/fd")
    scratch = {"/tmp": "", "/dev/shm": f",size={spec['shm_bytes']}"}
    if spec["read_only"]:
        del scratch["/tmp"]
    for path, options in [*scratch.items(), *((path, "") for path in spec["tmpfs"])]:
        target = root / path.lstrip("/")
        target.mkdir(parents=True, exist_ok=True)
        mount("-t", "tmpfs", "-o", f"mode=1777{options}", "tmpfs", str(target))
    # The image's Python: at the same paths, because a virtual environment knows its own.
    for path in spec["software"]:
        bind(path, root / path.lstrip("/"), read_only=True)
    for source, target_name, read_only in spec["mounts"]:
        bind(source, root / target_name.lstrip("/"), read_only=read_only)
    bind(spec["hosts"], root / "etc/hosts", read_only=True)
    if spec["read_only"]:
        mount("-o", "remount,ro,bind", str(root))
    return root


def main() -> None:
    """Build the root, enter it, drop every privilege and run the command."""
    spec = json.loads(sys.argv[1])
    os.umask(0o022)
    root = build_root(spec)
    os.chroot(root)
    os.chdir("/")
    os.setgroups([])
    os.setgid(spec["gid"])
    os.setuid(spec["uid"])
    libc = ctypes.CDLL(None)
    # unshare(1) asked for it, but it is forgotten when the user changes.
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError("the parent's death would go unnoticed")
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError("no_new_privs was refused")
    os.execvpe(spec["argv"][0], spec["argv"], spec["environment"])


if __name__ == "__main__":
    main()
