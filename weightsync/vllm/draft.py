"""Which draft model an engine has, and how a version names the tensors of it.

Speculation by n-grams or suffixes has no weights. What else vLLM offers is refused at start: it
makes tensors of the draft's weights that nobody would update.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

#: What the paths of a draft begin with, and its tensors' names unless its checkpoint is the
#: target's.
DRAFT = "draft."

#: Methods of vLLM's SpeculativeConfig that have no model.
_WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")
_WITH_MODEL = ("eagle", "eagle3", "mtp", "draft_model")
#: Drafts that keep copies of their weights, or tensors made of them, outside of parameters.
_HIDDEN = ("gemma4_mtp",)


def draft_names(config: Any) -> str | None:
    """Return the prefix of a draft's tensor names; None: the engine has no draft.

    It is "" for MTP layers, which keep their names in the target's checkpoint.
    """
    spec = getattr(config, "speculative_config", None)
    if spec is None or spec.method in _WITHOUT_MODEL:
        return None
    return "" if spec.method == "mtp" and _one_checkpoint(config) else DRAFT


def _one_checkpoint(config: Any) -> bool:
    target, draft = config.model_config, config.speculative_config.draft_model_config
    if getattr(target, "revision", None) != getattr(draft, "revision", None):
        return False
    return os.path.realpath(str(draft.model)) == os.path.realpath(str(target.model))


def draft_of(worker: Any) -> tuple[Any, str] | None:
    """Return the draft of a vLLM worker and its `draft_names`; None: it has none.

    Raises LookupError if it should have one and none is found.
    """
    names = draft_names(getattr(worker, "vllm_config", None))
    if names is None:
        return None
    found = getattr(worker.model_runner, "get_draft_model", lambda: None)()
    if found is None:
        # Releases of vLLM before 0.30 have no such method.
        found = getattr(getattr(worker.model_runner, "drafter", None), "model", None)
    if found is None:
        msg = "vLLM's draft model was not found; start vLLM without --speculative-config"
        raise LookupError(msg)
    return found, names


def _model_type(spec: Any) -> str:
    hf_config = getattr(getattr(spec, "draft_model_config", None), "hf_config", None)
    return str(getattr(hf_config, "model_type", ""))


def draft_refusals(config: Any) -> Iterator[str]:
    spec, parallel = config.speculative_config, config.parallel_config
    if spec is None or spec.method in _WITHOUT_MODEL:
        return
    ranks = parallel.tensor_parallel_size
    own = getattr(spec.draft_parallel_config, "tensor_parallel_size", ranks)
    if spec.method not in _WITH_MODEL:
        yield (
            f"speculation by {spec.method} is not supported, because an update would not update "
            "what it computed from its weights; use eagle, eagle3, mtp, draft_model or ngram"
        )
    if _model_type(spec) in _HIDDEN:
        yield (
            f"{_model_type(spec)} is not supported, because vLLM keeps what it computes from the "
            "draft's weights where no update reaches it; start vLLM without --speculative-config"
        )
    if getattr(spec, "parallel_drafting", False):
        yield (
            "parallel drafting is not supported, because vLLM keeps a state that it computes "
            "from the draft's weights; set parallel_drafting to false"
        )
    if parallel.pipeline_parallel_size > 1:
        yield (
            "a draft model beside pipeline parallel ranks is not supported; start vLLM with "
            "--pipeline-parallel-size 1 or without --speculative-config"
        )
    if own != ranks:
        yield (
            f"a draft on {own} of {ranks} ranks is not supported; set "
            "draft_tensor_parallel_size to the target's"
        )
