"""What fast paths ask about the memory of their tensors."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode

from comm_utils.fast_path import FastPath
from comm_utils.kernels import PlainBatch
from comm_utils.torch_support.fast_arguments import overwrites
from comm_utils.torch_support.flattening import flatten, unflatten
from comm_utils.torch_support.plain_tensors import by_device


def test_inputs_that_outputs_overwrite() -> None:
    draw = random.Random(0)
    found = []
    for _ in range(500):
        memory = torch.zeros(40, dtype=torch.int8)
        cuts = sorted(draw.sample(range(41), 6))
        outputs = [memory[cuts[at] : cuts[at + 1]] for at in (0, 2, 4)]
        draw.shuffle(outputs)
        inputs = []
        for _ in range(3):
            begin = draw.randrange(40)
            inputs.append(memory[begin : begin + draw.randint(1, 6)])
        for one in outputs:
            one.fill_(1)
        found.append(overwrites(outputs, inputs))
        assert found[-1] == any(bool(one.any()) for one in inputs)
    assert 20 < sum(found) < 480
    assert not overwrites([memory[:4]], [torch.zeros(4)])


def test_a_call_goes_to_the_fast_path_of_its_device() -> None:
    taken: list[str] = []

    def path(name: str) -> FastPath:
        return lambda *tensors: taken.append(name) is None

    assert by_device({}) is None
    alone = path("alone")
    assert by_device({"meta": alone}) is alone
    both = by_device({"cpu": path("cpu"), "meta": path("meta")})
    assert both is not None
    here, there = torch.ones(1), torch.ones(1, device="meta")
    for tensors, wanted in (
        ((here,), "cpu"),
        ((there, here), "meta"),
        (([there], here), "meta"),
        (([here], []), "cpu"),
        (((there,),), "meta"),
        ((PlainBatch(),), "cpu"),
    ):
        taken.clear()
        assert both(*tensors)
        assert taken == [wanted]
    taken.clear()
    for refused in (False, None):
        both = by_device({"cuda": path("cuda"), "meta": path("meta")}, refused)
        assert both is not None
        for other in (None, [], [None], torch.nn.Parameter(there), here):
            assert both(other) is refused
    assert taken == []


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, which forward-mode differentiation loads
def test_lists_are_copied_under_a_transform_and_a_mode_as_well() -> None:
    class Counted(TorchDispatchMode):
        seen: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.seen.add(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    def whole(source: torch.Tensor) -> torch.Tensor:
        targets = [torch.zeros(2) + 0 * source[:2], torch.zeros(1) + 0 * source[:1]]
        unflatten(source, targets)
        return flatten(targets)

    rows = torch.arange(6.0).view(2, 3)
    assert torch.equal(torch.vmap(whole)(rows), rows)
    with Counted():
        assert whole(rows[0]).tolist() == [0, 1, 2]
    assert "copy_" in Counted.seen
    assert "_foreach_copy_" not in Counted.seen
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.arange(3.0), torch.ones(3))
        targets = [torch.zeros(2), torch.zeros(1)]
        unflatten(dual, targets)
        assert [one.tolist() for one in targets] == [[0, 1], [2]]
        assert forward_ad.unpack_dual(targets[0]).tangent.tolist() == [1, 1]
    unflatten(torch.ones(0), [])
    for dtype in (torch.float32, torch.uint16, torch.float8_e5m2, torch.complex64, torch.bool):
        parts = [torch.ones(3).to(dtype), torch.ones(2, 2).to(dtype).t()]
        found = [torch.zeros_like(part) for part in parts]
        unflatten(flatten(parts), found)
        pairs = zip(found, parts, strict=True)
        assert all(torch.equal(one.to(torch.complex64), part.to(torch.complex64)) for one, part in pairs)
