"""Generate the gRPC stubs from protos/, or check that the committed ones are what it would write.

The proto packages are named like our import packages, so protoc's own imports are right and no
generated line is ever rewritten. The versions of the generators are part of the output, and are
checked against the `generate` dependency group first.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PROTOS = ROOT / "protos"
PATTERNS = ("*_pb2.py", "*_pb2.pyi", "*_pb2_grpc.py", "*_pb2_grpc.pyi")


def main() -> int:
    """Generate in place, or compare when `--check` is given."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, fail on a difference")
    check: bool = parser.parse_args().check
    if wrong := _wrong_tools():
        print("\n".join(wrong), file=sys.stderr)
        return 2
    if not check:
        _generate(ROOT)
        return 0
    with tempfile.TemporaryDirectory(prefix="weightsync-stubs-") as folder:
        _generate(Path(folder))
        differences = _differences(Path(folder))
    if differences:
        print("\n".join(differences), file=sys.stderr)
        print("the stubs are not those of protos/: run `make generate`", file=sys.stderr)
    return 1 if differences else 0


def _wrong_tools() -> list[str]:
    """Return one line per generator that is missing or outside its pinned range."""
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]
    wrong = []
    for line in groups["generate"]:
        wanted = Requirement(line)
        try:
            found = metadata.version(wanted.name)
        except metadata.PackageNotFoundError:
            found = "none"
        if found == "none" or found not in wanted.specifier:
            wrong.append(
                f"{wanted} is wanted to generate the stubs, found {found}: run `make setup`"
            )
    return wrong


def _generate(out: Path) -> None:
    """Write the stubs of every proto file below `out`, each folder a package."""
    # The plugins are console scripts of this interpreter's environment, which need not be on PATH.
    scripts = Path(sys.executable).parent
    protos = sorted(PROTOS.rglob("*.proto"))
    command = [
        sys.executable,
        "-m",
        "grpc_tools.protoc",
        f"--proto_path={PROTOS}",
        *(
            f"--plugin={name}={scripts / name}"
            for name in ("protoc-gen-mypy", "protoc-gen-mypy_grpc")
        ),
        *(f"--{kind}_out={out}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")),
        *map(str, protos),
    ]
    subprocess.run(command, check=True)
    for folder in sorted({proto.parent.relative_to(PROTOS) for proto in protos}):
        text = f'"""Generated from protos/{folder} by `make generate`: not edited by hand."""\n'
        (out / folder / "__init__.py").write_text(text)


def _differences(fresh: Path) -> list[str]:
    """Compare fresh stubs with the committed ones; a stub without a proto counts as well."""
    wanted = {path.relative_to(fresh) for path in fresh.rglob("*") if path.is_file()}
    found = {
        path.relative_to(ROOT)
        for top in {path.parts[0] for path in wanted}
        for pattern in PATTERNS
        for path in (ROOT / top).rglob(pattern)
    }
    lines = [f"{path}: no proto file makes it" for path in sorted(found - wanted)]
    for path in sorted(wanted):
        if not (ROOT / path).is_file():
            lines.append(f"{path}: missing")
        elif not filecmp.cmp(fresh / path, ROOT / path, shallow=False):
            lines.append(f"{path}: differs")
    return lines


if __name__ == "__main__":
    sys.exit(main())
