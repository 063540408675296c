"""moto's server, with conditional writes as S3 has them: of two that create a key one is refused.

moto looks whether the key is there and then writes, and another thread may write between the two.
A program: it runs where moto is installed, and this project is not.
"""

from __future__ import annotations

import importlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_CONDITIONS = ("HTTP_IF_MATCH", "HTTP_IF_NONE_MATCH")


def _main() -> None:
    served = importlib.import_module("moto.moto_server.werkzeug_app")
    application = served.DomainDispatcherApplication
    answer, writing = application.__call__, threading.Lock()

    def one_at_a_time(self: object, environ: Mapping[str, Any], start_response: object) -> object:
        if environ["REQUEST_METHOD"] != "PUT" or not any(name in environ for name in _CONDITIONS):
            return answer(self, environ, start_response)
        with writing:
            return answer(self, environ, start_response)

    application.__call__ = one_at_a_time
    importlib.import_module("moto.server").main()


if __name__ == "__main__":
    _main()
