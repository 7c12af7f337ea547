"""Pipelines on real ranks against the same model on one rank, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import comm_orchestrator as dist
from comm_collectives import hooks
from comm_collectives.hooks.pipeline import Compute, Message, StageChannel
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError
from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]


class Layer(nn.Module):
    """Passes two tensors on, one of which needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + torch.tanh(self.linear(x)) * mask, mask


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layer = Layer()

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> Any:
        return self.layer(self.embedding(ids), mask)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x, mask)[0])


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def same_gradients(name: str, chunks: int) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    stages = W * chunks
    layers = [First() if n == 0 else Last() if n == stages - 1 else Layer() for n in range(stages)]
    if stages == 1:
        return
    model = nn.ModuleList(layers).double()
    with torch.no_grad():
        model[-1].head.weight.copy_(model[0].embedding.weight)
    single = copy.deepcopy(model)
    single[-1].head.weight = single[0].embedding.weight
    M = 2 * W
    schedule = {
        "gpipe": lambda: hooks.gpipe(W, M),
        "1f1b": lambda: hooks.one_forward_one_backward(W, M),
        "interleaved": lambda: hooks.interleaved(W, M, chunks),
    }[name]()
    own = [model[stage] for stage in schedule.stages_of(rank)]
    if W == 1:
        own[-1].head.weight = own[0].embedding.weight
        tied: Any = []
    else:
        ends = {0: model[0].embedding.weight, W - 1: model[-1].head.weight}
        tied = [hooks.tie_parameter(ends.get(rank))]
    for step in range(2):
        ids = torch.randint(0, 10, (2 * M, 3), generator=torch.Generator().manual_seed(step))
        mask = torch.rand(2 * M, 3, 1, generator=torch.Generator().manual_seed(step)).double()
        inputs = list(zip(ids.chunk(M), mask.chunk(M), strict=True))
        losses = hooks.run_schedule(
            schedule, own, inputs if rank == 0 else None, ids if rank == W - 1 else None, loss_of, tied=tied
        )
        x: Any = (ids, mask)
        for layer in single[:-1]:
            x = layer(*x)
        expected = loss_of(single[-1](*x), ids)
        expected.backward()
        if rank == W - 1:
            assert len(losses) == M
            torch.testing.assert_close(sum(losses) / M, expected.detach(), rtol=1e-12, atol=1e-12)
        else:
            assert losses == []
    for stage in schedule.stages_of(rank):
        for (key, mine), theirs in zip(model[stage].named_parameters(), single[stage].parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-13, msg=f"{stage}.{key}")
    evaluated = hooks.run_schedule(
        hooks.forward_only(W, M, chunks), own, inputs if rank == 0 else None, ids if rank == W - 1 else None, loss_of
    )
    for before, again in zip(losses, evaluated, strict=True):
        assert torch.equal(before, again)
        assert not again.requires_grad


@pytest.mark.parametrize(("name", "chunks"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2), ("interleaved", 3)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_those_of_one_rank(pools: Pools, world_size: int, name: str, chunks: int) -> None:
    pools(world_size).run(same_gradients, name, chunks)


def large_and_frozen() -> None:
    """Activations larger than what a library buffers, and a first stage that needs no gradients."""
    rank, W = dist.get_rank(), dist.get_world_size()
    stage = nn.Linear(512, 512)
    if rank == 0:
        stage.requires_grad_(False)
    batch = torch.ones(4 * W * 256, 512) if rank == 0 else None
    schedule = hooks.one_forward_one_backward(W, 4 * W)
    losses = hooks.run_schedule(schedule, stage, batch, None, lambda output: output.square().mean())
    if rank == W - 1:
        assert len(losses) == 4 * W
    assert (stage.weight.grad is None) == (rank == 0)


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_activations_and_frozen_stages(pools: Pools, world_size: int) -> None:
    pools(world_size).run(large_and_frozen)


def other_shapes() -> None:
    rank = dist.get_rank()
    channel = StageChannel()
    first, second = (Message("forward", 0, number, 0, 1) for number in (0, 1))
    tensors = [torch.ones(2, 3), torch.ones((), dtype=torch.bool)]
    channel.exchange([first], {first: tensors} if rank == 0 else {})
    if rank == 1:
        assert torch.equal(channel.receive(first)[0], tensors[0])
        assert [str(one) for one in channel.types(0)] == ["float32 of shape (2, 3)", "bool of shape ()"]
    else:
        with pytest.raises(
            ArgumentError, match=r"stage 0: got float32 of shape \(3, 3\) for activations of micro-batch 1"
        ):
            channel.exchange([second], {second: [torch.ones(3, 3)]})
        other = Message("forward", 2, 0, 0, 1)
        with pytest.raises(ArgumentError, match=r"got an activation of torch.float8_e5m2; expected one of float32"):
            channel.exchange([other], {other: [torch.ones(2).to(torch.float8_e5m2)]})
    channel.finish_sends()


class Thawing(nn.Module):
    """Its activations require gradients in some micro-batches alone."""

    def __init__(self, with_gradients: list[bool]) -> None:
        super().__init__()
        self.linear, self.with_gradients = nn.Linear(2, 2), with_gradients

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.linear(x)
        return y, y * 2 if self.with_gradients.pop(0) else y.detach()


def gradients_of_some_microbatches() -> None:
    rank = dist.get_rank()
    schedule = hooks.gpipe(2, 2)

    def last(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x + y).sum()

    first = Thawing([True, False])
    hooks.run_schedule(schedule, last if rank else first, torch.ones(2, 2), group=None, gradient_scale=1.0)
    if not rank:
        assert first.linear.bias.grad.tolist() == [4.0, 4.0]  # 3 and 1
        channel = StageChannel()
        messages = [Message("forward", 0, number, 0, 1) for number in (0, 1)]
        needing = torch.ones(2, requires_grad=True)
        channel.exchange(messages[:1], {messages[0]: [torch.ones(2), needing]})
        with pytest.raises(ArgumentError, match=r"micro-batch 1 .*: no gradient comes back where that one needs none"):
            channel.exchange(messages[1:], {messages[1]: [needing, needing]})
        channel.finish_sends()
    else:
        channel = StageChannel()
        message = Message("forward", 0, 0, 0, 1)
        channel.exchange([message], {})
        channel.receive(message)


def test_microbatches_that_need_other_gradients(pools: Pools) -> None:
    pools(2).run(gradients_of_some_microbatches)


def stages_that_begin_in_place(chunks: int) -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)
    layers = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6)).double() for _ in range(W * chunks)]
    layers[0] = nn.Linear(6, 6).double()
    single = copy.deepcopy(layers)
    data, targets = torch.randn(4, 6, dtype=torch.float64), torch.randint(0, 6, (4,))
    schedule = hooks.interleaved(W, 2, chunks) if chunks > 1 else hooks.one_forward_one_backward(W, 2)
    stages = layers[rank::W]
    losses = hooks.run_schedule(schedule, stages, data, targets, F.cross_entropy)
    expected = F.cross_entropy(nn.Sequential(*single)(data), targets)
    expected.backward()
    if rank == W - 1:
        torch.testing.assert_close(torch.stack(losses).mean(), expected, rtol=1e-12, atol=0)
    for stage, one in zip(stages, single[rank::W], strict=True):
        for mine, its in zip(stage.parameters(), one.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, its.grad, rtol=1e-10, atol=1e-14)


def changes_what_the_stage_before_saved() -> None:
    torch.manual_seed(8)
    stages = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.ReLU(inplace=True), nn.Linear(6, 6))]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):  # as in one process
        hooks.run_schedule(
            hooks.interleaved(1, 1, 2), stages, torch.randn(2, 6), torch.zeros(2).long(), F.cross_entropy
        )


def test_stages_may_begin_in_place(pools: Pools) -> None:
    pools(2).run(stages_that_begin_in_place, 1)
    pools(2).run(stages_that_begin_in_place, 2)
    pools(1).run(stages_that_begin_in_place, 2)
    pools(1).run(changes_what_the_stage_before_saved)


def test_shapes_are_agreed_once(pools: Pools) -> None:
    pools(2).run(other_shapes)


def with_data_parallel() -> None:
    rank = dist.get_rank()
    groups = hooks.ParallelGroups.from_sizes(data=2, pipeline=2)
    torch.manual_seed(3)
    model = [nn.Linear(3, 5).double(), nn.Linear(5, 2).double()]
    single = copy.deepcopy(nn.Sequential(*model))
    stage = model[groups.pipeline.rank]
    whole = torch.randn(16, 3, dtype=torch.float64)
    mine = whole.chunk(2)[groups.data.rank]
    with hooks.register_data_parallel_hooks(stage, group=groups.data.group) as handle:
        for _ in range(2):
            stage.zero_grad()
            hooks.run_schedule(
                hooks.one_forward_one_backward(2, 4), stage, mine, None, torch.mean, groups, no_sync=handle.no_sync
            )
            single.zero_grad()
            single(whole).mean().backward()
            for one, other in zip(stage.parameters(), single[groups.pipeline.rank].parameters(), strict=True):
                torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)
    assert rank >= 0


def several_stages_with_data_parallel() -> None:
    groups = hooks.ParallelGroups.from_sizes(data=2, pipeline=2)
    torch.manual_seed(3)
    model = [nn.Linear(4, 4).double() for _ in range(4)]
    single = copy.deepcopy(nn.Sequential(*model))
    schedule = hooks.interleaved(2, 4, 2)
    own = schedule.stages_of(groups.pipeline.rank)
    stages = nn.ModuleList([model[stage] for stage in own])
    whole = torch.randn(16, 4, dtype=torch.float64)
    mine = whole.chunk(2)[groups.data.rank]
    handles = [hooks.register_data_parallel_hooks(stage, group=groups.data.group) for stage in stages]

    def all_no_sync() -> ExitStack:
        stack = ExitStack()
        for handle in handles:
            stack.enter_context(handle.no_sync())
        return stack

    culprit = max(own)  # backward passes end with the first stage
    with pytest.raises(
        ArgumentError,
        match=rf"no_sync: the hooks of register_data_parallel_hooks\(\) on stage {culprit} .*nn.ModuleList\(stages\)",
    ):
        hooks.run_schedule(schedule, stages, mine, None, torch.mean, groups.pipeline.group, no_sync=all_no_sync)
    for handle in handles:
        handle.remove()
    with hooks.register_data_parallel_hooks(stages, group=groups.data.group) as handle:
        for _ in range(2):
            stages.zero_grad()
            hooks.run_schedule(schedule, stages, mine, None, torch.mean, groups, no_sync=handle.no_sync)
            single.zero_grad()
            single(whole).mean().backward()
            for stage in own:
                for one, other in zip(model[stage].parameters(), single[stage].parameters(), strict=True):
                    torch.testing.assert_close(one.grad, other.grad, rtol=1e-12, atol=1e-14)


def test_data_parallel_pipelines(pools: Pools) -> None:
    pools(4).run(with_data_parallel)
    pools(4).run(several_stages_with_data_parallel)


def accumulate_tied(is_last_alone: bool) -> None:
    """Train two data-parallel pipelines on several batches, of which each or the last one alone is reduced."""
    groups = hooks.ParallelGroups.from_sizes(data=2, pipeline=2)
    torch.manual_seed(3)
    embedding, inner, head = nn.Embedding(6, 3).double(), nn.Linear(3, 3).double(), nn.Linear(3, 6, bias=False).double()
    head.weight = embedding.weight
    single = copy.deepcopy(nn.Sequential(embedding, inner, head))
    head.weight = nn.Parameter(embedding.weight.detach().clone())
    stage = nn.Sequential(inner, head) if groups.pipeline.rank else nn.Sequential(embedding)
    copied = head.weight if groups.pipeline.rank else embedding.weight
    with hooks.register_data_parallel_hooks(stage, group=groups.data.group) as handle:
        tied = hooks.tie_parameter(copied, groups)
        for number in range(3):
            ids = torch.randint(0, 6, (8,), generator=torch.Generator().manual_seed(number))
            mine = ids.chunk(2)[groups.data.rank]
            schedule = hooks.one_forward_one_backward(2, 2)
            with handle.no_sync() if is_last_alone and number < 2 else nullcontext():
                hooks.run_schedule(
                    schedule, stage, mine, mine, F.cross_entropy, groups, no_sync=handle.no_sync, tied=[tied]
                )
            F.cross_entropy(single(ids), ids).backward()
    torch.testing.assert_close(copied.grad, single[0].weight.grad, rtol=1e-12, atol=1e-14)
    everyones: list[Any] = [None] * 4
    dist.all_gather_object(everyones, copied.grad.tolist())
    assert everyones == everyones[:1] * 4


def test_tied_parameters_accumulate_with_data_parallel_hooks(pools: Pools) -> None:
    for is_last_alone in (False, True):
        pools(4).run(accumulate_tied, is_last_alone)


def tied_without_gradients() -> None:
    rank = dist.get_rank()
    module = nn.Linear(4, 10, bias=False) if rank else nn.Embedding(10, 4)
    module.weight.requires_grad_(False)
    stage = nn.Sequential(nn.Linear(4, 4), module) if rank else nn.Sequential(module, nn.Linear(4, 4))
    tied = hooks.tie_parameter(module.weight)
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.1, weight_decay=0.5)
    before = module.weight.clone()
    ids = torch.arange(8)
    for _ in range(2):
        hooks.run_schedule(hooks.gpipe(2, 2), stage, ids, ids, F.cross_entropy, tied=[tied])
        optimizer.step()
    assert module.weight.grad is None
    assert torch.equal(module.weight, before)
    if rank:  # the head alone
        module.weight.requires_grad_()
    hooks.run_schedule(hooks.gpipe(2, 2), stage, ids, ids, F.cross_entropy, tied=[tied])
    assert module.weight.grad is not None
    everyones: list[Any] = [None] * 2
    dist.all_gather_object(everyones, module.weight.grad.tolist())
    assert everyones[0] == everyones[1]


def test_tied_parameters_without_gradients_stay_without(pools: Pools) -> None:
    pools(2).run(tied_without_gradients)


def tied_and_sparse() -> None:
    rank = dist.get_rank()
    torch.manual_seed(0)
    embedding, head = nn.Embedding(10, 4, sparse=True), nn.Linear(4, 10, bias=False)
    stage = (embedding, head)[rank]
    tied = hooks.tie_parameter(stage.weight)
    ids = torch.arange(8)
    alone = embedding.weight.detach().clone().requires_grad_()
    F.cross_entropy(F.linear(F.embedding(ids, alone), alone), ids).backward()
    hooks.run_schedule(hooks.gpipe(2, 2), stage, ids, ids, F.cross_entropy, tied=[tied])
    torch.testing.assert_close(stage.weight.grad, alone.grad)


def test_tied_embeddings_may_have_sparse_gradients(pools: Pools) -> None:
    pools(2).run(tied_and_sparse)


def tied_to_the_first_of_ranks() -> None:
    rank, W = dist.get_rank(), dist.get_world_size()
    for ranks, expected in (((0, -1), 0), ((-1, 0), W - 1)):
        parameter = nn.Parameter(torch.full((2,), float(rank)))
        tied = hooks.tie_parameter(parameter if rank in (0, W - 1) else None, ranks=ranks)
        assert tied.parameter is None or tied.parameter.tolist() == [expected] * 2
    mine = (0, -1) if rank else (-1, 0)
    with pytest.raises(CollectiveMismatchError, match=r"tie_parameter: ranks\[0\]: got "):
        hooks.tie_parameter(parameter, ranks=mine)


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_parameters_begin_with_the_copy_of_the_first_of_ranks(pools: Pools, world_size: int) -> None:
    pools(world_size).run(tied_to_the_first_of_ranks)


def tied_after_failures() -> None:
    rank = dist.get_rank()
    parameter = nn.Parameter(torch.ones(2))
    tied = hooks.tie_parameter(parameter)
    parameter.grad = torch.full((2,), 10.0)
    tied.start()  # of a run that fails
    parameter.grad = None
    tied.start()
    parameter.grad = torch.full((2,), rank + 1.0)
    tied.reduce_gradients()
    assert parameter.grad.tolist() == [3.0, 3.0]


def tied_and_sharded(stage: int) -> str:
    """Return how a pipeline is refused in which one rank has sharded hooks on its tied parameter."""
    rank = dist.get_rank()
    embedding, head = nn.Embedding(4, 2), nn.Linear(2, 4, bias=False)
    module = head if rank else embedding
    tied = hooks.tie_parameter(module.weight)
    own = [dist.new_group([one]) for one in range(2)][rank]
    ids = torch.arange(4)
    calls = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return module(x)

    with hooks.register_sharded_hooks(module, stage, own) if rank else nullcontext():
        with pytest.raises(ArgumentError) as caught:
            hooks.run_schedule(hooks.gpipe(2, 2), counted, ids, ids, F.cross_entropy, tied=[tied])
        assert not calls
        if rank:
            with pytest.raises(ArgumentError, match=r"TiedParameter\.start: the tied parameter"):
                tied.start()
        with pytest.raises(ArgumentError, match=r"the tied parameter of shape .* register_sharded_hooks\(\)"):
            hooks.tie_parameter(module.weight)
    with pytest.raises(ArgumentError, match="tied: got 3; expected results of tie_parameter"):
        hooks.run_schedule(hooks.gpipe(2, 2), counted, ids, ids, F.cross_entropy, tied=[3])  # type: ignore[list-item]
    hooks.run_schedule(hooks.gpipe(2, 2), module, ids, ids, F.cross_entropy, tied=[tied])
    return str(caught.value)


def test_tied_parameters_with_sharded_hooks_are_refused(pools: Pools) -> None:
    pools(2).run(tied_after_failures)
    for stage in (1, 2, 3):
        first, second = pools(2).run(tied_and_sharded, stage)
        assert "rank 1 refused its arguments" in first
        for text in (first, second):
            assert "run_schedule: the tied parameter of shape (4, 2) has the hooks of register_sharded_hooks()" in text


def refusals() -> list[str]:
    rank, W = dist.get_rank(), dist.get_world_size()
    stage = nn.Linear(2, 2)
    calls = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return stage(x)

    found = []
    right = hooks.one_forward_one_backward(W, 4)
    batch = torch.ones(4, 2)
    for schedule, stages, inputs in [
        (hooks.gpipe(W, 4) if rank == 1 else right, counted, batch),
        (hooks.one_forward_one_backward(W, 2 if rank == 2 else 4), counted, batch if rank != 2 else batch[:2]),
        (hooks.one_forward_one_backward(W + 1, 4), counted, batch),
        (right, [counted, counted], batch),
        (right, counted, None),
        (right, counted, list(torch.ones(3, 1, 2))),
        (right, counted, [*torch.ones(3, 1, 2), torch.ones(2, 2)]),
        (right, 3, batch),
        ("1f1b", counted, batch),
    ]:
        with pytest.raises((ArgumentError, CollectiveMismatchError)) as caught:
            hooks.run_schedule(schedule, stages, inputs, None, torch.sum)  # type: ignore[arg-type]
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    for options in ({"device": "gpu"}, {"tied": None}, {"gradient_scale": "1"}, {"no_sync": object()}):
        with pytest.raises((ArgumentError, ArgumentTypeError)) as caught:
            hooks.run_schedule(right, counted, batch, None, torch.sum, **(options if rank == 1 else {}))
        found.append(f"{type(caught.value).__name__}: {caught.value}")
    assert not calls
    hooks.run_schedule(right, counted, batch, None, torch.sum)
    assert len(calls) == 4
    if W > 1:
        with pytest.raises((ArgumentError, CollectiveMismatchError)) as caught:
            hooks.tie_parameter(stage.weight if rank == 0 else None)
        assert "rank" in str(caught.value)
        with pytest.raises(ArgumentError, match=r"tie_parameter: got arguments that cannot be used: TypeError: "):
            hooks.tie_parameter(stage.weight, ranks=None if rank == 0 else (0, 1))
        with pytest.raises(CollectiveMismatchError, match=r"got \[0, 1\] on rank"):
            hooks.tie_parameter(stage.weight, ranks=(0, 1) if rank == 0 else (0, 2))
    return found


def wrong_losses() -> list[str]:
    rank = dist.get_rank()
    stage = nn.Linear(2, 2)
    calls = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        calls.append(x)
        return stage(x)

    found = []
    batch, targets = torch.ones(4, 2), torch.zeros(4, dtype=torch.int64)
    schedule = hooks.gpipe(2, 4)
    for given, loss_function in (
        (targets, None),
        (None, F.cross_entropy),
        (None, nn.CrossEntropyLoss()),
        (targets, lambda output: output.sum()),
        (targets, 3),
    ):
        with pytest.raises(ArgumentError) as caught:
            hooks.run_schedule(schedule, counted, batch, given, loss_function)  # type: ignore[arg-type]
        found.append(str(caught.value))
    assert not calls
    hooks.run_schedule(schedule, counted, batch, targets, nn.CrossEntropyLoss())
    hooks.run_schedule(schedule, counted, batch, None, torch.sum)
    hooks.run_schedule(hooks.forward_only(2, 4), counted, batch, targets)
    own = [dist.new_group([one]) for one in range(2)][rank]
    for function, message in (
        (torch.square, r"loss_function returned a loss of shape \(1, 2\) for micro-batch 0; expected a scalar"),
        (None, r"the last stage, without a loss_function, returned a loss of shape \(1, 2\).*pass a loss_function"),
        (lambda output: (output,), r"loss_function returned .*; expected a tensor"),
    ):
        with pytest.raises(ArgumentError, match=message):
            hooks.run_schedule(hooks.gpipe(1, 4), stage, batch, None, function, own)
    return found


def test_wrong_losses_are_refused_on_all_ranks(pools: Pools) -> None:
    expected = [
        "loss_function: got None with targets",
        "targets: got no targets, but cross_entropy(output, ...) does not take these",
        "targets: got no targets, but CrossEntropyLoss(output, ...)",
        "targets: got 1 tensors for each micro-batch, but <lambda>(output, ...)",
        "loss_function: got 3; expected a function",
    ]
    first, second = pools(2).run(wrong_losses)
    for one, other, part in zip(first, second, expected, strict=True):
        assert part in one, one
        assert part in other, other
        assert "rank 1 refused its arguments" in one


def test_own_orders_are_of_passes() -> None:
    for orders, message in (
        (
            [[("forward", 0, 0)]],
            r"orders\[0\]\[0\]: got .*; expected a list for each rank .*Compute\('forward', stage=0",
        ),
        ([3], r"orders\[0\]: got 3"),
        (None, "orders: got None"),
        ([[Compute("forward", "0", 0)]], ".*expected integers as stage and microbatch"),  # type: ignore[arg-type]
    ):
        with pytest.raises(ArgumentTypeError, match=rf"schedule_of: {message}"):
            hooks.schedule_of(orders)  # type: ignore[arg-type]


def test_wrong_calls_name_the_rank_before_anything_runs(pools: Pools) -> None:
    expected = [
        ("CollectiveMismatchError", "ranks 0, 2: 1f1b of 3 ranks", "rank 1: gpipe of 3 ranks"),
        ("CollectiveMismatchError", "rank 2: 1f1b of 3 ranks with 1 stages each and 2 micro-batches"),
        ("ArgumentError", "schedule: got one for 4 ranks; expected 3"),
        ("ArgumentError", "stages: got 2; expected 1"),
        ("Argument", "inputs: got None; expected a list of 4 micro-batches"),
        ("ArgumentError", "inputs: got 3 micro-batches; expected 4"),
        ("ArgumentError", "inputs: got shapes [(2, 2)] in micro-batch 3"),
        ("Argument", "stages: got 3; expected modules or functions"),
        ("Argument", "schedule: got '1f1b'; expected a Schedule"),
        ("Argument", "device: got 'gpu'; expected a torch.device"),
        ("Argument", "tied: got None; expected a list"),
        ("Argument", "gradient_scale: got '1'; expected a number"),
        ("Argument", "no_sync: got <object object"),
    ]
    for rank, found in enumerate(pools(3).run(refusals)):
        for place, (text, parts) in enumerate(zip(found, expected, strict=True)):
            for part in parts:
                assert part in text, text
            if place in (4, 5, 6) and rank:
                assert "run_schedule: rank 0 refused its arguments" in text
            if place > 8 and rank != 1:
                assert "run_schedule: rank 1 refused its arguments" in text
