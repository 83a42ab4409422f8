"""A small language model with random weights, made on the spot, whose output depends on its KV.

With the usual initialiser (0.02) such a model repeats one token whatever its KV holds, and a
comparison of outputs would prove nothing. With 0.15, flipped bits in one stored KV object change
greedy tokens and log-probabilities.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

VOCABULARY = 4096
INITIALIZER_RANGE = 0.15
FIRST_WORD = 3
"""Token ids below are the special tokens."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a Llama-like model."""

    layers: int = 8
    hidden: int = 512
    intermediate: int = 1408
    heads: int = 8
    kv_heads: int = 4
    max_tokens: int = 65536

    @property
    def kv_bytes_per_token(self) -> int:
        """K and V of all layers, in float32."""
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * 4


def make_model(folder: Path, shape: ModelShape, seed: int = 0) -> None:
    """Write config, float32 weights and a word-level tokenizer into ``folder``.

    float32, because CPUs without bfloat16 instructions emulate it some 20 times slower. Needs
    torch and transformers, which come with vLLM. Equal arguments make equal weights.
    """
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call] # theirs

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_tokens,
        initializer_range=INITIALIZER_RANGE,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        tie_word_embeddings=True,
        dtype=torch.float32,
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(folder)  # type: ignore[no-untyped-call] # theirs

    words = ["<pad>", "<s>", "</s>", *(f"w{i}" for i in range(FIRST_WORD, VOCABULARY))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(  # type: ignore[no-untyped-call] # theirs
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    ).save_pretrained(folder)


def random_prompt(tokens: int, seed: int) -> list[int]:
    """Token ids of a prompt that shares no chunk with one of another seed."""
    words = random.Random(seed)
    return [words.randrange(FIRST_WORD, VOCABULARY) for _ in range(tokens)]
