"""What fast paths ask about the memory of their tensors."""

from __future__ import annotations

import random

import torch

from comm_utils.fast_path import FastPath
from comm_utils.torch_support.fast_arguments import overwrites
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
