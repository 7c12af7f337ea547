"""On slow links, two ranks exchange encoded pieces as messages: with the same bits as in collectives."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

import comm_orchestrator as dist
from comm_collectives.compression import pace
from comm_collectives.compression.link import Link
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

SIZES = (1, 15, 1000, 300_001, 3_000_000)


def reduced(method: str, count: int, async_op: bool) -> torch.Tensor:
    """Return an average of tensors that ranks have drawn, after a call that leaves something for the next one."""
    compression = dist.Compression(method, error_feedback=None if method in ("onebit", "topk") else True)
    for step in range(2):
        random = torch.Generator().manual_seed(10 * step + dist.get_rank())
        tensor = torch.randn(count, generator=random)
        work = dist.all_reduce(tensor, "avg", async_op=async_op, compression=compression.of("w"))
        if work is not None:
            work.wait()
    return tensor


def both_ways(config: dict[str, Any], is_slow_here: list[bool]) -> list[tuple[int, bool]]:
    """Return how many messages each call took on a link that is said to be slow, and whether its bits are the same."""
    dist.init_distributed("gloo", verbose=False, timeout=60, config=config)
    found = []
    for method in ("int8", "fp16", "onebit", "topk"):
        for count in SIZES:
            for async_op in (False, True):
                expected = reduced(method, count, async_op)
                slow = is_slow_here[dist.get_rank()]
                with (
                    mock.patch.object(pace, "choose", lambda *_, slow=slow: pace.Choice(slow, False)),
                    mock.patch.object(Link, "send", autospec=True, side_effect=Link.send) as sent,
                ):
                    got = reduced(method, count, async_op)
                found.append((sent.call_count, torch.equal(expected, got)))
    gc.collect()
    dist.destroy_process_group()
    return found


@pytest.mark.parametrize(
    ("config", "is_slow_here", "sends"),
    [
        ({}, [True, True], True),
        ({}, [True, False], False),
        ({"checks": {"mismatch": "strict"}}, [True, True], False),
    ],
)
def test_messages_give_the_same_bits(
    bare_pools: Pools, config: dict[str, Any], is_slow_here: list[bool], sends: bool
) -> None:
    for found in bare_pools(2).run(both_ways, config, is_slow_here):
        assert all(same for _, same in found)
        # A rank that adds nothing up may have nothing to send.
        assert any(count > 2 for count, _ in found) is sends
        assert sends or not any(count for count, _ in found)
