"""Every command and snippet of README and docs: parsed by what it is for, and run where it can be.

A new one is found by itself. What a page may show is said here: languages, programs, and which of
a program's words stand for a reader's own. What vLLM's parser takes is in tests/vllm.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import MagicMock

import pytest
import torch
import typer.main
import yaml
from pydantic_settings import CliApp
from safetensors.torch import save_file

import weightsync_client
from tests.support.serving import serving_memory
from tests.support.snippets import PAGES, PROGRAMS, ROOT, Command, Snippet, blocks, commands, inline
from weightsync_client.attach import Attached
from weightsync_client.cli.cli_options import ExitCode
from weightsync_client.cli.main import app, main
from weightsync_server.extensions.trainer.training import TrainVerbs
from weightsync_server.extensions.vllm_verbs import VllmVerbs
from weightsync_server.flags import Flags

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Flags of others that sentences name: of etcd, Docker, Podman and Buildah.
_OTHERS_FLAGS = frozenset(
    {"--build-arg", "--client-cert-auth", "--layers", "--trusted-ca-file", "--ulimit"}
)
#: What vLLM's own parser takes, which tests/vllm/test_plain.py asks.
VLLM_FLAGS = frozenset(
    {"--api-key", "--api-server-count", "--data-parallel-size", "--dtype", "--headless", "--model"}
    | {
        "--allowed-origins",
        "--device-ids",
        "--ec-manager-config",
        "--ec-transfer-config",
        "--enable-sleep-mode",
        "--enforce-eager",
        "--kv-offloading-size",
        "--kv-transfer-config",
        "--load-format",
        "--served-model-name",
        "--nnodes",
        "--otlp-traces-endpoint",
        "--node-rank",
        "--quantization",
    }
    | {"--port", "--speculative-config", "--weight-transfer-config"}
)
#: Words that stand for a reader's own: what they may be.
_NUMBERS = frozenset({"N", "VERSION", "ID", "JOB", "COUNT"})
_FOLDERS = frozenset({"DIR", "FOLDER", "FILE", "PATH", "OLD", "NEW"})
#: What snippets call by these names.
_OBJECTS: dict[str, type] = {
    "client": weightsync_client.Client,
    "attached": Attached,
    "pushed": weightsync_client.PushResult,
    "report": weightsync_client.ApplyReport,
}
_CLI = typer.main.get_command(app)


def _id(snippet: object) -> str:
    return str(snippet)


def _of(language: str) -> list[Snippet]:
    return [block for block in blocks() if block.language == language]


def test_every_block_is_of_a_language_that_is_tried_here() -> None:
    tried = {"sh", "bash", "python", "json", "yaml", "toml", "text", "mermaid"}
    # In tests/deploy.
    tried |= {"promql"}
    assert {str(block): block.language for block in blocks() if block.language not in tried} == {}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_no_command_stands_outside_a_block(page: Path) -> None:
    # An indented block has no language, so nobody would try it.
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert set(re.findall(r"^ {4,}([\w-]+) ", text, re.MULTILINE)) & PROGRAMS == set()


@pytest.mark.parametrize("block", [*_of("sh"), *_of("bash")], ids=_id)
def test_a_shell_takes_it(block: Snippet) -> None:
    shell = ["bash", "-n"]
    done = subprocess.run(shell, input=block.text, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("block", _of("json"), ids=_id)
def test_it_is_json(block: Snippet) -> None:
    json.loads(block.text)


@pytest.mark.parametrize("block", _of("yaml"), ids=_id)
def test_it_is_yaml(block: Snippet) -> None:
    assert isinstance(yaml.safe_load(block.text), dict)


@pytest.mark.parametrize("block", _of("toml"), ids=_id)
def test_it_is_toml(block: Snippet) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_a_link_leads_to_the_file_that_it_names(page: Path) -> None:
    for name, target in re.findall(r"\[([^]]+)\]\(([^)#]+)[^)]*\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target
            # A name that ends as a file's does is one.
            assert not re.search(r"\.(py|md|yml)$", name) or name in target, (name, target)


# Python: what it imports of ours is there, and what it calls takes what it gives.


@pytest.mark.parametrize("block", _of("python"), ids=_id)
def test_it_is_python_that_our_interfaces_take(block: Snippet) -> None:
    _check_python(ast.parse(block.text))


#: A name alone is that of a setting of prime-rl, where it begins with `client`.
_EXPRESSION = re.compile(r"client\.\w+\(|(attached|pushed|report)\.\w+")
_EXPRESSIONS = [code for code in inline() if _EXPRESSION.match(code.text)]


@pytest.mark.parametrize("code", _EXPRESSIONS, ids=_id)
def test_an_expression_in_a_sentence_is_taken_too(code: Snippet) -> None:
    _check_python(ast.parse(code.text))


def _check_python(tree: ast.AST) -> None:
    known: dict[str, Any] = dict(_OBJECTS)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weightsync"):
            module = importlib.import_module(node.module or "")
            known |= {name.name: getattr(module, name.name) for name in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            _check_call(node, known)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = known.get(node.value.id)
            assert owner is None or _has(owner, node.attr), ast.unparse(node)


def _has(owner: Any, name: str) -> bool:
    if hasattr(owner, name) or name in getattr(owner, "__annotations__", {}):
        return True
    return f"self.{name}: " in (text := inspect.getsource(owner)) or f"self.{name} = " in text


def _check_call(call: ast.Call, known: dict[str, Any]) -> None:
    own: tuple[None, ...] = ()
    match call.func:
        case ast.Name(id=name) if name in known:
            called = known[name]
        case ast.Attribute(value=ast.Name(id=name), attr=method) if name in known:
            called = getattr(known[name], method)
            own = () if inspect.ismethod(called) else (None,)
        case _:
            return
    names = [key.arg for key in call.keywords if key.arg is not None]
    some = dict.fromkeys(names)
    inspect.signature(called).bind_partial(*own, *call.args, **some)


# Our programs: their own parsers.


def _replaced(words: tuple[str, ...]) -> list[str]:
    """Return the words with values in the place of those that stand for a reader's own."""
    own = dict.fromkeys(_NUMBERS, "7") | dict.fromkeys(_FOLDERS, ".")
    return [own.get(word, word) for word in words]


def _leaf(words: list[str]) -> tuple[Any, list[str]]:
    """Return the command that is meant, and its arguments."""
    command: Any = _CLI
    while hasattr(command, "commands") and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"there is no command {words[0]}"
        command, words = command.commands[words[0]], words[1:]
    return command, words


@pytest.mark.parametrize("command", commands("weightsync"), ids=_id)
def test_weightsync_takes_it(command: Command) -> None:
    found, arguments = _leaf(_replaced(command.words)[1:])
    try:
        found.make_context(command.words[1], arguments)
    except Exception as error:
        # A sentence may name a command alone; a block must be as it is typed.
        if not command.in_sentence or type(error).__name__ != "MissingParameter":
            raise


@pytest.mark.parametrize("command", commands("weightsync-server"), ids=_id)
def test_weightsync_server_takes_it(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    words = _replaced(command.words)[1:]
    if words in (["token", "new"], ["--version"], ["--help"]):
        return
    arguments = words[: words.index("--")] if "--" in words else words
    # A sentence may name a flag without its value.
    if command.in_sentence and arguments[-1].startswith("--"):
        assert arguments[-1] in _server_flags()
        return
    for name in os.environ:
        if name.startswith("WEIGHTSYNC_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("WEIGHTSYNC_FLEET_MEMBER", "host7")
    CliApp.run(Flags, cli_args=arguments)


def _server_flags() -> set[str]:
    flags: set[str] = {"--version"}
    for name, field in Flags.model_fields.items():
        flag = name.replace("_", "-")
        flags.add(f"--{flag}")
        if field.annotation is bool:
            flags.add(f"--no-{flag}")
    return flags


def _client_flags(command: Any = _CLI) -> set[str]:
    own = {flag for p in command.params for flag in (*p.opts, *p.secondary_opts)}
    return own.union(*map(_client_flags, getattr(command, "commands", {}).values()))


def _added_flags(*folders: str) -> set[str]:
    """Return the flags of programs of this repository that are for developers."""
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    text = "\n".join(path.read_text() for path in sources)
    return set(re.findall(r"add_argument\(\s*\"(--[\w-]+)\"", text))


def test_every_flag_that_a_sentence_names_is_one() -> None:
    known = _server_flags() | _client_flags() | VLLM_FLAGS | _OTHERS_FLAGS
    known |= _added_flags("benchmarks", "examples", "tests")
    named = {
        (str(code), flag)
        for code in inline()
        if code.text.startswith("--")
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", code.text)
    }
    assert {where for where in named if where[1] not in known} == set()


def test_every_variable_that_a_page_names_is_read_by_something() -> None:
    folders = ("weightsync", "server", "client", "deploy", "tests", "scripts", "benchmarks")
    read = "\n".join(
        path.read_text(errors="replace")
        for folder in (*(ROOT / folder for folder in folders), ROOT)
        for path in (folder.glob("*") if folder == ROOT else folder.rglob("*"))
        if path.suffix in (".py", ".sh", ".service", ".yaml", ".yml")
    )
    settings = {f"WEIGHTSYNC_{name.upper()}" for name in Flags.model_fields}
    for page in PAGES:
        named = set(re.findall(r"\bWEIGHTSYNC_[A-Z_]*[A-Z]\b", page.read_text()))
        assert {name for name in named - settings if name not in read} == set(), page


# Programs of others.


@pytest.mark.parametrize("command", commands("make"), ids=_id)
def test_make_has_it(command: Command) -> None:
    words = [word for word in command.words[1:] if not word.isupper()]
    done = subprocess.run(
        ["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", commands("pip"), ids=_id)
def test_pip_finds_what_it_is_told_to_install(command: Command) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert command.words[1] == "install"
    match command.words[2:]:
        case ("--group", group):
            assert group in project["dependency-groups"]
        case (what,):
            name, _, extras = what.partition("[")
            # The name on an index, or the checkout that a reader is in.
            assert name in (project["project"]["name"], ".")
            known = set(project["project"]["optional-dependencies"])
            assert set(extras.rstrip("]").split(",")) - {""} <= known
        case _:
            pytest.fail(str(command))


@pytest.mark.parametrize("command", commands("python", "torchrun"), ids=_id)
def test_python_finds_what_it_is_told_to_run(command: Command) -> None:
    words = list(command.words[1:])
    if words == ["-O"]:
        return
    if "-m" in words:
        at = words.index("-m")
        module, arguments = words[at + 1], words[at + 2 :]
        if module.partition(".")[0] not in {"benchmarks", "tests", "examples"}:
            return  # of others: vLLM's flags are asked of vLLM, pytest's of nobody
        path = ROOT / module.replace(".", "/")
        source = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    else:
        (script,) = (word for word in words if word.endswith(".py"))
        source, arguments = ROOT / script, words[words.index(script) + 1 :]
    assert source.is_file()
    flags = {word for word in arguments if word.startswith("--")}
    assert flags <= _added_flags("benchmarks", "examples", "tests")


@pytest.mark.parametrize("command", commands("docker"), ids=_id)
def test_docker_has_the_service_or_stage(command: Command) -> None:
    services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
    match command.words[1:]:
        case ("compose", "-f", _, "-f", _, "up", *flags) | ("compose", "up", *flags):
            assert set(flags) <= {"--build", "--wait"}
        case ("build", "-f", file, "--target", stage, "."):
            assert f" AS {stage}\n" in (ROOT / file).read_text()
        case ("compose", "exec" | "logs", service, *inside):
            assert service in services
            if inside:
                test_weightsync_takes_it(Command(command.source, tuple(inside), in_sentence=False))
        case _:
            pytest.fail(str(command))


@pytest.mark.parametrize("command", commands("curl"), ids=_id)
def test_curl_asks_for_what_there_is(command: Command) -> None:
    (url,) = (word for word in command.words if re.search(r"(localhost|127\.0\.0\.1):", word))
    path = "/" + url.removeprefix("http://").partition("/")[2]
    ours = VllmVerbs(MagicMock(), "default", []).verbs
    # The last is vLLM's own; tests/deploy/test_new_user.py types it.
    assert path in {*ours, *TrainVerbs(MagicMock(), "default").verbs, "/v1/completions"}
    json.loads(command.words[command.words.index("-d") + 1])


def test_no_program_is_unknown_here() -> None:
    # tests/matrix/test_extending.py copies what docs/how-to/extending.md does.
    shell = {"cp", "export", "for", "do", "done", "install", "kubectl", "ssh"}
    unknown = {one.words[0] for one in commands()} - PROGRAMS - shell
    assert unknown == set()
    assert (ROOT / "deploy/prometheus/alerts_test.yml").is_file()


# And run, where a server that generates nothing is enough.


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    """Have a server run whose version 2 is live; returns what stands for a reader's own."""
    with tempfile.TemporaryDirectory(prefix="wsd") as name:
        folder = Path(name)
        model = folder / "model"
        model.mkdir()
        save_file({"w": torch.ones(8, 4)}, model / "model.safetensors")
        own = dict.fromkeys(_NUMBERS, "2") | dict.fromkeys(_FOLDERS, str(model))
        with serving_memory(folder, model) as client:
            client.apply(client.push({"w": torch.zeros(8, 4)}).version)
            yield own | {"": f"unix:{folder}/server.sock", "e1": "memory"}


#: Has no end; and what needs a fleet or a trainer, which the tests of their pages run.
_NOT_RUN = frozenset({"watch", "fleet", "train", "checkpoint"})


@pytest.mark.parametrize(
    "command", [c for c in commands("weightsync") if c.words[1] not in _NOT_RUN], ids=_id
)
def test_a_server_answers_it(
    command: Command, served: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WEIGHTSYNC_ADDRESS", served[""])
    words = [served.get(word, word) for word in command.words[1:]]
    monkeypatch.setattr(sys, "argv", ["weightsync", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    named = command.in_sentence and ended.value.code == ExitCode.USAGE
    assert named or ended.value.code not in (ExitCode.FAULT, ExitCode.USAGE), command


_ADDRESS = "127.0.0.1:50551"


def test_a_server_serves_what_the_method_for_openrlhf_pushes(
    served: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (text,) = (one.text for one in _of("python") if "def broadcast_to_vllm" in one.text)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    barriers: list[None] = []
    own: dict[str, Any] = {"torch": torch}
    own["torch_dist_barrier_and_cuda_sync"] = lambda: barriers.append(None)
    exec(text.replace(_ADDRESS, served[""]), own)
    model = torch.nn.Module()
    trainer = SimpleNamespace(
        actor=SimpleNamespace(model=SimpleNamespace(module=model)),
        strategy=SimpleNamespace(args=SimpleNamespace(ds=SimpleNamespace(zero_stage=2))),
    )
    for sync in (1, 2):
        model.register_parameter("w", torch.nn.Parameter(torch.full((8, 4), 10.0 + sync)))
        own["broadcast_to_vllm"](trainer)
        with weightsync_client.Client(served[""]) as client:
            (live,) = [one for one in client.versions() if one.serving == "live"]
        assert live.metadata["sync"] == str(sync)
        assert len(barriers) == sync
    trainer.weightsync.close()


class _Model(torch.nn.Module):
    """What the server's engine serves, as a model of eight tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.rand(8, 4))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.w[ids] @ self.w.T


#: What a trainer has, who has sampled one answer of two tokens.
_SAMPLED: dict[str, Any] = {
    "sequences": [[1, 2, 3], [4, 5]],
    "answers": [{"x-weightsync-version": "2", "x-weightsync-spans": "2:0-2"}],
    "served": [[-1.0, -2.0]],
    "own": [[-1.5, -2.0]],
}


@pytest.mark.parametrize(
    "block", [b for b in _of("python") if f'with Client("{_ADDRESS}")' in b.text], ids=_id
)
def test_a_server_takes_what_the_snippet_pushes(block: Snippet, served: dict[str, str]) -> None:
    own = {"model": _Model(), "steps": 2, "run": "r", "Client": weightsync_client.Client}
    own |= _SAMPLED
    exec(block.text.replace(_ADDRESS, served[""]), own)
    assert isinstance(own["pushed"], weightsync_client.PushResult)
