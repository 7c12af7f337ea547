"""Deterministic reductions: the bits of an element depend on the ranks' elements alone, on every library."""

from __future__ import annotations

import atexit
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from world_helpers import BACKENDS

import comm_orchestrator as dist
from comm_collectives import buffers
from comm_collectives.reduction import fixed_order
from comm_utils import parse_reduce_op
from comm_utils.errors import ArgumentError, ArgumentTypeError, CollectiveMismatchError, LaunchError
from comm_utils.testing import RankPool, run_ranks
from comm_utils.torch_support.folding import fold, fold_compensated

Pools = Callable[[int], RankPool]
#: Elements that every rank has in common use; calls reduce parts of them.
LENGTH = 3000
SUMS = ("sum", "avg")
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128)
FORMS = (
    "all_reduce",
    "inference_all_reduce",
    "all_reduce_coalesced",
    "coalescing",
    "reduce",
    "reduce_scatter_tensor",
    "reduce_scatter",
    "reduce_scatter_coalesced",
)


def elements(dtype: torch.dtype, W: int, kind: str) -> torch.Tensor:
    """Return what every rank has, (W, LENGTH): of magnitudes that differ, with what is not finite, or so small."""
    random = torch.Generator().manual_seed(W)
    shape = (W, LENGTH, 2) if dtype.is_complex else (W, LENGTH)
    found = torch.randn(shape, generator=random, dtype=torch.float64)
    if kind == "magnitudes":
        found *= 2.0 ** torch.randint(-12, 12, shape, generator=random)
    elif kind == "not finite":
        rare = torch.rand(shape, generator=random)
        found[rare < 0.02] = torch.inf
        found[rare > 0.98] = -torch.inf
        found[(rare > 0.5) & (rare < 0.52)] = torch.nan
    elif kind == "denormal":
        found *= torch.finfo(dtype).tiny
    return torch.view_as_complex(found).to(dtype) if dtype.is_complex else found.to(dtype)


def reference(parts: torch.Tensor, op: str, compensated: bool = False) -> torch.Tensor:
    """Return the sum, product or average over the first dimension, in the order that is promised."""
    real = torch.view_as_real(parts).flatten(1) if parts.is_complex() else parts
    total = real.new_empty(real.shape[1])
    (fold_compensated if compensated else fold)(real, parse_reduce_op(op), total)
    return torch.view_as_complex(total.view(-1, 2)) if parts.is_complex() else total


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether all bits are equal, but for those of NaN."""
    if one.is_complex():
        one, other = torch.view_as_real(one), torch.view_as_real(other)
    bits = torch.int64 if one.dtype is torch.float64 else torch.int32 if one.dtype is torch.float32 else torch.int16
    equal = one.contiguous().view(bits) == other.contiguous().view(bits)
    return bool((equal | (one.isnan() & other.isnan())).all())


def placed(values: torch.Tensor, shift: int) -> torch.Tensor:
    """Return a copy of ``values`` that begins ``shift`` elements into its memory."""
    return torch.cat([values.new_zeros(shift), values])[shift:]


def call(form: str, own: torch.Tensor, op: Any, asynchronous: bool, shift: int, cuts: list[int]) -> torch.Tensor | None:
    """Reduce this rank's ``own`` elements, (n,), in some ``form``; return all of the result, None where it is not."""
    rank, W = dist.get_rank(), dist.get_world_size()
    tensor = placed(own, shift)
    if form in ("all_reduce", "inference_all_reduce"):
        work = getattr(dist, form)(tensor, op, async_op=asynchronous)
    elif form in ("all_reduce_coalesced", "coalescing"):
        sizes = [end - begin for begin, end in zip([0, *cuts], [*cuts, len(own)], strict=True)]
        parts = [placed(part, shift) for part in torch.split(own, sizes)]
        if form == "coalescing":
            with dist.coalescing(asynchronous) as handle:
                for part in parts:
                    dist.all_reduce(part, op)
            work = handle
        else:
            work = dist.all_reduce_coalesced(parts, op, async_op=asynchronous)
        if asynchronous:
            work.wait()
        return torch.cat(parts)
    elif form == "reduce":
        work = dist.reduce(tensor, W - 1, op, async_op=asynchronous)
        if asynchronous:
            work.wait()
        if rank != W - 1:
            assert same_bits(tensor, own)
            return None
        return tensor
    else:  # every rank gets the part of one rank, and all ranks' parts are the whole
        n = len(own)
        step = -(-n // W)
        if form == "reduce_scatter_tensor":
            padded = torch.cat([own, own.new_zeros(step * W - n)])
            output = placed(own.new_empty(step), shift)
            work = dist.reduce_scatter_tensor(output, placed(padded, shift), op, async_op=asynchronous)
        elif form == "reduce_scatter":
            edges = [0, *sorted(n * (r + 1) ** 2 // W**2 for r in range(W))]
            entries = [placed(own[begin:end], shift) for begin, end in pairwise(edges)]
            output = torch.empty_like(entries[rank])
            work = dist.reduce_scatter(output, entries, op, async_op=asynchronous)
        else:
            found = dist.reduce_scatter_coalesced([tensor, own[:1].clone()], op=op, async_op=asynchronous)
            work, output = (found, None) if asynchronous else (None, found[0])
        if asynchronous:
            work.wait()
            output = work.result()[0] if output is None else output
        lengths: list[Any] = [None] * W
        dist.all_gather_object(lengths, len(output))
        everyone = [own.new_empty(length) for length in lengths]
        dist.all_gather(everyone, output)
        return torch.cat(everyone)[:n]
    if asynchronous:
        work.wait()
    return tensor


def run_calls(dtype: torch.dtype, kind: str, compensated: bool, small_pieces: bool, calls: list[Any]) -> list[str]:
    """Return those of ``calls`` whose result has other bits than the reference."""
    rank, W = dist.get_rank(), dist.get_world_size()
    parts = elements(dtype, W, kind)
    limits = fixed_order._GATHERED_BYTES, fixed_order._PIECE_BYTES
    if small_pieces:
        fixed_order._GATHERED_BYTES, fixed_order._PIECE_BYTES = 64, 1000
    dist.set_deterministic_reductions(compensated=compensated)
    try:
        wrong = []
        for form, op, asynchronous, shift, begin, count, cuts in calls:
            some = parts[:, begin : begin + count]
            expected = reference(some.contiguous(), op, compensated and op in SUMS)
            inside = sorted(cut % (some.shape[1] + 1) for cut in cuts)
            found = call(form, some[rank].contiguous(), op, asynchronous, shift, inside)
            if found is not None and not same_bits(found, expected):
                wrong.append(f"{form} {op} of {count} at {begin}, async={asynchronous}, shift={shift}, cuts={inside}")
        return wrong
    finally:
        fixed_order._GATHERED_BYTES, fixed_order._PIECE_BYTES = limits
        dist.set_deterministic_reductions(False)


def set_up() -> None:
    dist.init_distributed(os.environ["TESTS_LIBRARY"], verbose=False)
    atexit.register(dist.destroy_process_group)


@pytest.fixture(scope="module")
def worlds() -> Iterator[Callable[[str, int], RankPool]]:
    """``worlds(backend, W)``: W ranks on a library, which stay."""
    started: dict[tuple[str, int], RankPool] = {}
    with ExitStack() as stack:

        def world(backend: str, W: int) -> RankPool:
            if (backend, W) not in started:
                library, variables = BACKENDS[backend]
                variables = {"CCL_SHARED_MEMORY_PROFILE": "0", "TESTS_LIBRARY": library, **variables}
                started[backend, W] = stack.enter_context(RankPool(W, env=variables, setup=set_up))
            return started[backend, W]

        yield world


def drawn_calls(ops: tuple[str, ...]) -> st.SearchStrategy[list[Any]]:
    one = st.tuples(
        st.sampled_from(FORMS),
        st.sampled_from(ops),
        st.booleans(),
        st.integers(0, 3),
        st.integers(0, LENGTH // 2),
        st.one_of(st.integers(1, 40), st.integers(1, LENGTH // 2)),
        st.lists(st.integers(0, LENGTH), max_size=3),
    )
    return st.lists(one, min_size=1, max_size=4)


QUICK = [("gloo", 1), ("gloo", 2), ("gloo", 3), ("gloo", 4), ("shared memory", 3), ("oneCCL", 2)]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("backend", "W"),
    [
        pytest.param(backend, W, marks=[] if (backend, W) in QUICK else pytest.mark.slow)
        for backend in BACKENDS
        for W in (1, 2, 3, 4)
    ],
)
def test_bits_depend_on_the_elements_alone(worlds: Callable[[str, int], RankPool], backend: str, W: int) -> None:
    @settings(max_examples=10)  # of each world
    @given(
        calls=drawn_calls(("sum", "avg", "product")),
        dtype=st.sampled_from(DTYPES),
        kind=st.sampled_from(("usual", "magnitudes", "not finite", "denormal")),
        compensated=st.booleans(),
        small_pieces=st.booleans(),
    )
    def every_call(calls: list[Any], dtype: torch.dtype, kind: str, compensated: bool, small_pieces: bool) -> None:
        if dtype.is_complex:
            calls = [(form, "sum" if op == "product" else op, *rest) for form, op, *rest in calls]
        found = worlds(backend, W).run(run_calls, dtype, kind, compensated, small_pieces, calls)
        assert found == [[]] * W

    every_call()


def run_large() -> list[bool]:
    rank, W = dist.get_rank(), dist.get_world_size()
    random = torch.Generator().manual_seed(1)
    parts = torch.stack([torch.randn(5_000_003, generator=random) for _ in range(W)])
    expected = reference(parts, "sum")
    dist.set_deterministic_reductions()
    found = []
    try:
        for asynchronous in (False, True):
            tensor = parts[rank].clone()
            work = dist.all_reduce(tensor, async_op=asynchronous)
            if asynchronous:
                assert work is not None
                work.wait()
            found.append(same_bits(tensor, expected))
        # A slice of W ranks, for two pieces in each of two steps, and no more for a tensor that is larger.
        found.append(buffers._kept_bytes <= 4 * 3 * fixed_order._PIECE_BYTES)
        output = torch.empty(parts.shape[1])
        dist.reduce_scatter(output, [parts[rank]] * W)
        found.append(same_bits(output, expected))
    finally:
        dist.set_deterministic_reductions(False)
    return found


@pytest.mark.parametrize("W", [3])
def test_large_tensors_travel_in_pieces_to_the_same_bits(pools: Pools, W: int) -> None:
    assert pools(W).run(run_large) == [[True] * 4] * W


def run_moved() -> tuple[int, int]:
    """Return how many elements change where they lie elsewhere in a tensor, without the mode and with it."""
    rank, W = dist.get_rank(), dist.get_world_size()
    own = elements(torch.float32, W, "magnitudes")[rank]
    changed = []
    for on in (False, True):
        dist.set_deterministic_reductions(on)
        first, second = own.clone(), torch.cat([own[LENGTH // 3 :], own[: LENGTH // 3]])
        for tensor in (first, second):
            dist.all_reduce(tensor)
        back = torch.cat([second[-(LENGTH // 3) :], second[: -(LENGTH // 3)]])
        changed.append(int((first != back).sum()))
    dist.set_deterministic_reductions(False)
    return changed[0], changed[1]


@pytest.mark.gloo("whose ring begins elsewhere with each part of a tensor")
@pytest.mark.parametrize("W", [3, 4])
def test_without_it_the_bits_depend_on_the_place(pools: Pools, W: int) -> None:
    for without, within in pools(W).run(run_moved):
        assert without > LENGTH // 100
        assert within == 0


def run_repeated() -> list[str]:
    """Return the calls that give other bits than promised, the first time and once a fast path would serve them."""
    rank, W = dist.get_rank(), dist.get_world_size()
    parts = elements(torch.float32, W, "magnitudes")
    plain, expected = parts[rank], reference(parts, "sum")
    group = dist.new_group(list(range(W)))
    wrong = []

    def check(label: str, used: Any, is_on: bool) -> None:
        for asynchronous in (False, False, True, True):
            tensor = plain.clone()
            work = dist.all_reduce(tensor, group=used, async_op=asynchronous)
            if asynchronous:
                assert work is not None
                work.wait()
            if same_bits(tensor, expected) != is_on:
                wrong.append(label)
        whole = torch.full((W * 5,), rank, dtype=torch.int32)
        dist.all_reduce(whole, group=used)
        assert whole.tolist() == [W * (W - 1) // 2] * W * 5

    check("off", None, False)
    dist.set_deterministic_reductions(True, group)
    check("only the group's", group, True)
    check("not the world's", None, False)
    dist.set_deterministic_reductions(True)
    dist.set_deterministic_reductions(False, group)
    check("only the world's", None, True)
    check("not the group's", group, False)
    dist.set_deterministic_reductions(False)
    check("off again", None, False)
    dist.destroy_process_group(group)
    return wrong


@pytest.mark.gloo("whose own order gives other bits")
def test_fast_paths_and_groups_follow_the_setting(pools: Pools) -> None:
    assert pools(3).run(run_repeated) == [[]] * 3


def run_disagreeing() -> list[str]:
    rank, found = dist.get_rank(), []
    for enabled, compensated in ((rank == 0, False), (True, rank == 0)):
        try:
            dist.set_deterministic_reductions(enabled, compensated=compensated)
        except CollectiveMismatchError as error:
            found.append(str(error))
    # Nothing has changed: no rank exchanges what another one reduces.
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert tensor.tolist() == [dist.get_world_size()] * 5
    return found


def test_ranks_that_disagree_are_told_so(pools: Pools) -> None:
    for found in pools(3).run(run_disagreeing):
        assert found == [
            "the ranks disagree about deterministic reductions, which stay as they were: "
            "rank 0: set_deterministic_reductions(enabled=True, compensated=False); "
            "rank 1: set_deterministic_reductions(enabled=False, compensated=False); "
            "rank 2: set_deterministic_reductions(enabled=False, compensated=False)",
            "the ranks disagree about deterministic reductions, which stay as they were: "
            "rank 0: set_deterministic_reductions(enabled=True, compensated=True); "
            "rank 1: set_deterministic_reductions(enabled=True, compensated=False); "
            "rank 2: set_deterministic_reductions(enabled=True, compensated=False)",
        ]


def run_refused() -> list[str]:
    found = []
    tensor = torch.ones(100_000)

    def refused(call: Callable[[], object]) -> None:
        try:
            call()
        except (ArgumentError, ArgumentTypeError) as error:
            found.append(f"{type(error).__name__}: {error}")

    refused(lambda: dist.set_deterministic_reductions("maybe"))  # type: ignore[arg-type]
    refused(lambda: dist.set_deterministic_reductions(True, 3))  # type: ignore[arg-type]
    dist.set_deterministic_reductions()
    refused(lambda: dist.all_reduce(tensor, compression="int8"))
    dist.set_compression("fp16")
    refused(lambda: dist.all_reduce(tensor))
    everyone = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, tensor)  # which adds nothing
    dist.all_reduce(tensor, compression="none")
    dist.set_compression(None)
    dist.set_deterministic_reductions(False)
    return found


def test_wrong_and_contradictory_calls_are_refused(pools: Pools) -> None:
    for found in pools(2).run(run_refused):
        flag, group, of_call, of_group = found
        assert flag.startswith("ArgumentTypeError: set_deterministic_reductions: enabled: got 'maybe'")
        assert group.startswith("ArgumentTypeError: set_deterministic_reductions: group: got ")
        why = "on a group with deterministic reductions, whose results must not depend on where an element lies"
        assert of_call.startswith(f"ArgumentError: all_reduce: compression: got 'int8' in this call {why}")
        assert of_group.startswith(f"ArgumentError: all_reduce: compression: got 'fp16' from set_compression() {why}")


def run_configured(config: dict[str, Any], variables: dict[str, str]) -> bool:
    os.environ.update(variables)
    dist.init_distributed("gloo", verbose=False, timeout=60, config=config)
    try:
        dist.init_distributed(config=config)  # changes nothing
        rank, W = dist.get_rank(), dist.get_world_size()
        parts = elements(torch.float32, W, "magnitudes")
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        compensated = bool(config.get("reductions", {}).get("compensated"))
        return same_bits(tensor, reference(parts, "sum", compensated))
    finally:
        dist.destroy_process_group()
        for name in variables:
            del os.environ[name]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("config", "variables", "is_on"),
    [
        ({}, {}, False),
        ({"reductions": {"deterministic": True}}, {}, True),
        ({"reductions": {"compensated": True}}, {}, True),
        ({}, {"COMM_REDUCTIONS__DETERMINISTIC": "1"}, True),
    ],
    ids=["off", "on", "compensated", "variable"],
)
def test_the_configuration_sets_it(
    bare_pools: Pools, config: dict[str, Any], variables: dict[str, str], is_on: bool
) -> None:
    assert bare_pools(3).run(run_configured, config, variables) == [is_on] * 3


def run_different_settings() -> str:
    on = os.environ["RANK"] == "0"
    with pytest.raises(LaunchError) as caught:
        dist.init_distributed("gloo", verbose=False, timeout=60, config={"reductions": {"deterministic": on}})
    return str(caught.value)


@pytest.mark.cpu
def test_ranks_with_different_configurations_do_not_start(bare_pools: Pools) -> None:
    for text in bare_pools(2).run(run_different_settings):
        assert "reductions.deterministic" in text


def run_recorded() -> set[tuple[str, int, int]]:
    W = dist.get_world_size()
    dist.set_deterministic_reductions()
    dist.configure(enabled=True)
    dist.reset_log()
    try:
        for size in (8, 40_000):
            for asynchronous in (False, True):
                handles = [
                    dist.all_reduce(torch.ones(size), async_op=asynchronous),
                    dist.reduce(torch.ones(size), 0, async_op=asynchronous),
                    dist.reduce_scatter_tensor(torch.ones(size), torch.ones(size * W), async_op=asynchronous),
                ]
                for handle in handles if asynchronous else ():
                    assert handle is not None
                    handle.wait()
        return {(row.name, row.size_bytes, row.calls) for row in dist.log_rows()}
    finally:
        dist.configure(enabled=False)
        dist.reset_log()
        dist.set_deterministic_reductions(False)


@pytest.mark.gloo("which does not add in this order")
def test_a_call_is_recorded_once_under_its_own_name(pools: Pools) -> None:
    for rows in pools(3).run(run_recorded):
        assert rows == {
            (name, parts * 4 * size, 2)
            for name, parts in (("all_reduce", 1), ("reduce", 1), ("reduce_scatter_tensor", 3))
            for size in (8, 40_000)
        }


def run_compiled() -> list[bool]:
    rank, W = dist.get_rank(), dist.get_world_size()
    parts = elements(torch.float32, W, "magnitudes")
    found = []
    for on in (True, False):
        dist.set_deterministic_reductions(on)
        torch._dynamo.reset()

        @torch.compile(backend="eager")
        def reduced(tensor: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(tensor)
            return tensor

        found.append(same_bits(reduced(parts[rank].clone()), reference(parts, "sum")))
    return found


@pytest.mark.gloo("whose own order gives other bits")
def test_compiled_programs_keep_to_it(pools: Pools) -> None:
    assert pools(3).run(run_compiled) == [[True, False]] * 3


def run_compensated() -> tuple[float, float]:
    """Return the largest error of a plain and a compensated sum, in units of the last place of the exact result."""
    rank, W = dist.get_rank(), dist.get_world_size()
    parts = elements(torch.float32, W, "magnitudes")
    exact, errors = parts.double().sum(0), []
    unit = torch.finfo(torch.float32).eps * exact.abs()
    for compensated in (False, True):
        dist.set_deterministic_reductions(compensated=compensated)
        tensor = parts[rank].clone()
        dist.all_reduce(tensor)
        errors.append(float(((tensor.double() - exact).abs() / unit).max()))
    dist.set_deterministic_reductions(False)
    return errors[0], errors[1]


def test_compensation_makes_sums_more_exact(pools: Pools) -> None:
    for plain, compensated in pools(4).run(run_compensated):
        assert plain > 2
        assert compensated <= 0.51


def run_with_warnings_as_errors() -> None:
    dist.init_distributed("gloo", verbose=False)
    dist.set_deterministic_reductions(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for dtype in (torch.float32, torch.complex64):
            tensor = torch.ones(3, dtype=dtype)
            dist.all_reduce(tensor)
            assert tensor.tolist() == [2.0] * 3
    dist.destroy_process_group()


def test_the_first_call_warns_of_nothing() -> None:
    run_ranks(run_with_warnings_as_errors, 2)
