"""A rank of a variant, in a process of its own: it decodes when it is asked to, and says how long everything took."""

from __future__ import annotations

import functools
import os
import time
from pathlib import Path
from typing import Any

import torch
from measuring import Meeting

from inference.engines import ENGINES
from inference.model import build, layers_of, prompt

__all__ = ["Decoder"]


class Decoder:
    """Greedy decoding of one sequence, with a cache of keys and values.

    ``options``: ``parameters``, ``dtype``, and beside those of :func:`peers.rank.serve`.
    """

    def __init__(self, options: dict[str, Any], rank: int) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks = rank, int(options["ranks"])
        fd = os.open(options["meeting"], os.O_RDWR)
        self.meet = Meeting(fd, rank, self.ranks)
        os.close(fd)
        dtype = getattr(torch, options["dtype"])
        # After each layer's attention and MLP, and after the head.
        self.reductions = 2 * layers_of(options["parameters"]) + 1 if self.ranks > 1 else 0
        make = functools.partial(build, options["parameters"], dtype)
        self.engine = ENGINES[options["module"]](make, self.ranks, dtype)
        self.facts = {"torch": torch.__version__, **self.engine.facts}

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Decode ``question["tokens"]`` tokens after ``question["prompt"]`` tokens.

        ``question["save"]``: the file to write the logits of each token to; ``question["reference"]``: to compare them
        with. Returned are ``token_ns`` and, for each token, of its reductions ``inside_ns`` and ``ends_ns``.
        """
        tokens, found, times_ns, logits = question["tokens"], [], [], []
        cache, current = None, prompt(question["prompt"])
        calls, model, now_ns = self.engine.calls, self.engine.model, time.perf_counter_ns
        calls.inside_ns.clear()
        calls.ends_ns.clear()
        with torch.inference_mode():
            self.meet()
            start = now_ns()
            for _ in range(tokens):
                output = model(input_ids=current, past_key_values=cache, use_cache=True, logits_to_keep=1)
                cache, last = output.past_key_values, output.logits[:, -1]
                current = last.argmax(-1, keepdim=True)
                end = now_ns()
                times_ns.append(end - start)
                start = end
                found.append(current)
                logits.append(last)
        if len(calls.ends_ns) != tokens * self.reductions:
            raise SystemExit(f"got {len(calls.ends_ns)} reductions, expected {self.reductions} for each token")
        parts = [slice(one * self.reductions, (one + 1) * self.reductions) for one in range(tokens)]
        answer: dict[str, Any] = {"token_ns": times_ns}
        answer |= {name: [getattr(calls, name)[part] for part in parts] for name in ("inside_ns", "ends_ns")}
        if "save" in question:
            torch.save((torch.cat(found), torch.cat(logits)), question["save"])
        if "reference" in question:
            answer |= self.compared(torch.cat(found), torch.cat(logits), Path(question["reference"]))
        return answer

    @staticmethod
    def compared(tokens: torch.Tensor, logits: torch.Tensor, reference: Path) -> dict[str, Any]:
        """How many tokens are as in the reference, and how far the logits are off, of its largest.

        Up to the first other token and at it: what follows has another beginning.
        """
        expected_tokens, expected = torch.load(reference)
        differing = (tokens != expected_tokens).flatten().nonzero()
        same = int(differing[0]) if len(differing) else len(tokens)
        part = slice(0, same + 1)
        off = (logits[part].double() - expected[part].double()).abs().max() / expected[part].double().abs().max()
        return {"same": same, "off": float(off)}

    def close(self) -> None:
        self.engine.close()
