"""The variants: which library splits the model, and which library its ranks communicate through."""

from __future__ import annotations

import functools

from peers.catalogue import DEEPSPEED, DEEPSPEEDS_OPERATOR, Peer

__all__ = ["ALONE", "COMPILER", "NOTHING_SENT", "RANKS", "VARIANTS"]

RANKS = 2

_variant = functools.partial(Peer, session="bench-inference")
_OURS = ("comm_orchestrator", "comm_backend_ccl")

# The reference for tokens and logits: the whole model in a process of its own.
ALONE = _variant("one process", "alone", ("transformers",))
# Compiles DeepSpeed's operator, so that a late start of its ranks is not the compiler's.
COMPILER = _variant("DeepSpeed's compiler", "compiler", ("deepspeed",), DEEPSPEED, instructions=DEEPSPEEDS_OPERATOR)
# torch's own part of a reduction: its fake group returns at once, and leaves every rank its own part of each sum. Its
# tokens are therefore others, after as much computing.
NOTHING_SENT = _variant("torch, nothing sent", "parallelize_fake", ("transformers",))

# In the order of all tables.
VARIANTS = {
    variant.name: variant
    for variant in (
        _variant("AutoTP, ours", "auto_tp_ours", ("transformers", "deepspeed", *_OURS), DEEPSPEED),
        _variant(
            "AutoTP, DeepSpeed's operator",
            "auto_tp_operator",
            ("transformers", "deepspeed"),
            DEEPSPEED,
            instructions=DEEPSPEEDS_OPERATOR,
        ),
        _variant("AutoTP, gloo", "auto_tp_gloo", ("transformers", "deepspeed"), DEEPSPEED),
        _variant("torch, ours", "parallelize_ours", ("transformers", *_OURS)),
        _variant("torch, gloo", "parallelize_gloo", ("transformers",)),
        NOTHING_SENT,
    )
}
