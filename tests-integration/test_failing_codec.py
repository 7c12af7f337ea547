"""A codec that raises on one rank: it says which, and the other ranks learn why."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.compression.block_codecs import Integer
from comm_utils.errors import BrokenGroupError, CollectiveMismatchError, CommError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


class Raising(Integer):
    """Raises on rank 0, at the second piece that it encodes or decodes."""

    def __init__(self, encoding: bool) -> None:
        super().__init__(8)
        self._left = {"encode": 1, "decode": 1}
        self._fails = "encode" if encoding else "decode"

    def _count(self, name: str) -> None:
        self._left[name] -= 1
        if name == self._fails and self._left[name] < 0 and dist.get_rank() == 0:
            raise ValueError("too large")

    def encode(self, *args: Any, **kwargs: Any) -> None:
        self._count("encode")
        super().encode(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> None:
        self._count("decode")
        super().decode(*args, **kwargs)


def failing(backend: str, encoding: bool, async_op: bool) -> list[tuple[str, str]]:
    dist.init_distributed(backend, verbose=False, timeout=60)
    compression, found = dist.Compression("int8"), []
    compression.codec = Raising(encoding)
    group = dist.new_group([0, 1])
    for _ in range(2):
        try:
            work = dist.all_reduce(torch.ones(5_000_000), group=group, async_op=async_op, compression=compression)
            if work is not None:
                work.wait()
        except CommError as error:
            found.append((type(error).__name__, str(error)))
    dist.barrier()  # the other groups work
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("encoding", [False, True])
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
def test_a_codec_that_raises_on_one_rank(bare_pools: Pools, backend: str, encoding: bool, async_op: bool) -> None:
    own, others = bare_pools(2).run(failing, backend, encoding, async_op)
    text = "the compression int8(block_size=256) raised ValueError: too large"
    assert own[0][0] == own[1][0] == BrokenGroupError.__name__
    assert own[0][1].startswith(f"all_reduce: {text}.")
    assert text in own[1][1]
    assert others[0][0] == CollectiveMismatchError.__name__
    assert f"rank 0 gave up in all_reduce, as {text}" in others[0][1]
    assert others[1][0] == BrokenGroupError.__name__
