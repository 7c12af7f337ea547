"""The model: of the shape of Llama, with random weights that are the same in every process."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["build", "layers_of", "prompt"]

WIDTH, INNER, VOCABULARY = 1024, 2816, 8192
HEADS, KEY_VALUE_HEADS = 16, 8
# Weights of a layer: queries and output, keys and values, the three matrices of the MLP, and two norms.
LAYER = 2 * WIDTH**2 + 2 * WIDTH * WIDTH * KEY_VALUE_HEADS // HEADS + 3 * WIDTH * INNER + 2 * WIDTH
# The embedding, the head, and the last norm.
REST = 2 * VOCABULARY * WIDTH + WIDTH


def layers_of(parameters: int) -> int:
    """The number of layers with which a model has about this many weights."""
    return max(1, round((parameters - REST) / LAYER))


def build(parameters: int, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=INNER,
        num_hidden_layers=layers_of(parameters),
        num_attention_heads=HEADS,
        num_key_value_heads=KEY_VALUE_HEADS,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False).to(dtype)


def prompt(tokens: int) -> torch.Tensor:
    """Tokens to begin with: (1, tokens), int64."""
    return torch.randint(VOCABULARY, (1, tokens), generator=torch.Generator().manual_seed(1))
