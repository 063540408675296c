"""Keys by version from vLLM's API process alone, for a vLLM without the hooks in EngineCore."""

from __future__ import annotations

from typing import Any

from weightsync.vllm.lineage.cache_key import salted

__all__ = ["AdmissionKeys"]


class AdmissionKeys:
    """Gives each request the key of what is live when it comes.

    A request that runs over a switch files what it computes afterwards under the name of the
    version before, so that every switch makes a new name, and nothing is found again after a
    rollback.

    Args:
        llm: vLLM's AsyncLLM.
        key: The key to begin with.
    """

    def __init__(self, llm: Any, key: str) -> None:
        self._key = key
        self._switches = 0
        processor = llm.output_processor
        add = processor.add_request

        def add_request(request: Any, *args: Any, **kwargs: Any) -> None:
            # vLLM sends the request to EngineCore after this.
            request.cache_salt = salted(self._key, request.cache_salt)
            add(request, *args, **kwargs)

        processor.add_request = add_request

    def move(self, key: str) -> None:
        self._switches += 1
        self._key = f"{key}.{self._switches}"
