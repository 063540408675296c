"""vLLM's HTTP verbs, for trainers and scripts that write checkpoints and post where they are.

A request is answered by the server's own gRPC methods, behind the same interceptors: who may do
what, the limits, the metrics and the audit lines are theirs.
"""

from __future__ import annotations

from weightsync_server.extensions.vllm_verbs.verbs import VllmVerbs

__all__ = ["VllmVerbs"]
