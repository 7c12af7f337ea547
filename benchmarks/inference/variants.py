"""The variants: which library splits the model, and which library its ranks communicate through."""

from __future__ import annotations

import functools

from peers.catalogue import DEEPSPEED, Peer

__all__ = ["ALONE", "COMPILER", "RANKS", "VARIANTS"]

RANKS = 2

_variant = functools.partial(Peer, session="bench-inference")
_OURS = ("comm_orchestrator", "comm_backend_ccl")

# The reference for tokens and logits: the whole model in a process of its own.
ALONE = _variant("one process", "alone", ("transformers",))
# Compiles DeepSpeed's operator, so that a late start of its ranks is not the compiler's.
COMPILER = _variant("DeepSpeed's compiler", "compiler", ("deepspeed",), DEEPSPEED)

# In the order of all tables.
VARIANTS = {
    variant.name: variant
    for variant in (
        _variant("AutoTP, ours", "auto_tp_ours", ("transformers", "deepspeed", *_OURS), DEEPSPEED),
        _variant("AutoTP, DeepSpeed's operator", "auto_tp_operator", ("transformers", "deepspeed"), DEEPSPEED),
        _variant("AutoTP, gloo", "auto_tp_gloo", ("transformers", "deepspeed"), DEEPSPEED),
        _variant("torch, ours", "parallelize_ours", ("transformers", *_OURS)),
        _variant("torch, gloo", "parallelize_gloo", ("transformers",)),
    )
}
