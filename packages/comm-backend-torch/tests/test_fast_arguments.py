"""What fast paths ask about the memory of their tensors."""

from __future__ import annotations

import random

import torch

from comm_utils.torch_support.fast_arguments import overwrites


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
