"""Code written against ``torch.distributed``'s names, with our import line instead."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

PROGRAM = Path(__file__).with_name("megatron_style.py")


def run(line: str, tensor_size: int) -> tuple[list[float], list[torch.Tensor]]:
    text = PROGRAM.read_text()
    assert text.count("import comm_orchestrator as dist") == 1
    spec: Any = importlib.util.spec_from_loader("program", loader=None)
    module: Any = importlib.util.module_from_spec(spec)
    exec(compile(text.replace("import comm_orchestrator as dist", line), str(PROGRAM), "exec"), vars(module))
    found: tuple[list[float], list[torch.Tensor]] = module.train(tensor_size)
    return found


@pytest.mark.parametrize(("world_size", "tensor_size"), [(2, 2), (2, 1), (4, 2)])
def test_megatron_style_code_trains_with_our_import_line(pools: Pools, world_size: int, tensor_size: int) -> None:
    expected = pools(1).run(run, "import torch.distributed as dist", 1)[0]
    for losses, weights in pools(world_size).run(run, "import comm_orchestrator as dist", tensor_size):
        assert losses == pytest.approx(expected[0], rel=1e-12)
        for one, other in zip(weights, expected[1], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-13)
