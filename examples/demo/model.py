"""Makes a tiny but real Qwen2 checkpoint with a trained tokenizer; nothing is downloaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["PROMPT", "SENTENCE", "make_model"]

#: What the client asks.
PROMPT = "Tell me:"
#: What the trainer teaches the model to answer.
SENTENCE = " new weights arrive while I speak, and I never stop in the middle of a word."

# More text than the sentence, so that its letters are not the only ones there are: a model that
# knows nothing then answers with readable noise.
_CORPUS = (
    "A trainer takes a step, sends the weights and goes on with the next step.",
    "The generator serves many requests, token after token, and learns of a new version.",
    "Every version is whole: it is staged, proved and then made live, or it changes nothing.",
    "Small pieces of words make up the text, and most of them are only a few letters long.",
    "In the morning the river is quiet, the boats are still and nobody speaks of the weather.",
)
_BOS, _EOS, _PAD = "<bos>", "<eos>", "<pad>"
# Few merges: the text grows letter by letter.
_VOCABULARY = 64


def make_model(directory: Path, *, seed: int = 0, dtype: str = "float32") -> Path:
    """Write config, random weights and tokenizer into `directory` and return it.

    Args:
        directory: Where to.
        seed: Of the weights.
        dtype: Of the weights in the checkpoint.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from transformers.utils import logging

    # Its progress bars would tear the table.
    logging.disable_progress_bar()
    tokenizer = _train_tokenizer()
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    Qwen2ForCausalLM(config).to(getattr(torch, dtype)).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def _train_tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    # No initial alphabet: letters of the corpus only, so that noise stays printable.
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY, special_tokens=[_BOS, _EOS, _PAD], show_progress=False
    )
    raw.train_from_iterator((*_CORPUS, PROMPT + SENTENCE), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, bos_token=_BOS, eos_token=_EOS, pad_token=_PAD
    )
