"""What README and docs give to vLLM is taken by vLLM's own parser."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.main.test_snippets import VLLM_FLAGS
from tests.support.snippets import commands

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(120)]

_PARSE = """
import json, sys
from vllm.utils.argparse_utils import FlexibleArgumentParser
from weightsync.vllm.bridge.embedded import _vllm
parser = _vllm("make_arg_parser")(FlexibleArgumentParser())
for words in json.loads(sys.argv[1]):
    parser.parse_args(words)
unknown = set(json.loads(sys.argv[2])) - set(parser._option_string_actions)
assert not unknown, unknown
"""


def test_vllm_takes_what_the_pages_give_it() -> None:
    typed = [
        list(one.words[one.words.index(start) + 1 :])
        for one in commands("vllm", "python")
        for start in ("serve", "vllm.entrypoints.openai.api_server")
        if start in one.words
    ]
    assert len(typed) >= 4
    arguments = [json.dumps([["4" if w == "N" else w for w in words] for words in typed])]
    arguments.append(json.dumps(sorted(VLLM_FLAGS)))
    # In a process of its own, as vLLM sets much up when it is imported.
    command = [sys.executable, "-c", _PARSE, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
