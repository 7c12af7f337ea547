"""Every collective over dtypes, shapes, memory layouts, operations, groups and 1 to 4 ranks, against a reference.

Hypothesis draws plans here; the ranks of a pool carry them out and compare, see property_ranks.py. Each test has a
variant with many more examples, other ones in each run, which ``pytest -m slow`` runs; PROPERTY_EXAMPLES says how many.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

# The ranks import these by name, test folders being no packages.
import property_ranks
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from property_tensors import DENSE_LAYOUTS, READ_LAYOUTS

import comm_orchestrator as dist
from comm_utils.testing import RankPool

INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
FLOATS = ("float64", "float32", "float16", "bfloat16")
COMPLEX = ("complex64", "complex128", "complex32")
EIGHT_BITS = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
DTYPES = [name for name in ("bool", *FLOATS, *INTEGERS, *COMPLEX, *EIGHT_BITS) if hasattr(torch, name)]
OPS = ("sum", "avg", "min", "max", "product", "band", "bor", "bxor")

SHAPES = st.one_of(
    st.integers(0, 4).flatmap(lambda dims: st.tuples(*[st.sampled_from([4, 1, 2, 3, 5, 6, 0])] * dims)),
    st.sampled_from([(), (0,), (5,), (3, 4), (3, 0, 2), (2, 3, 4, 5), (1, 7, 1), (1000,), (33, 65), (4099,)]),
)
# Reductions are drawn twice as often for dtypes that have them, to leave room for the refused ones.
REDUCED = st.one_of(st.sampled_from([*FLOATS, *INTEGERS, "bool", "complex64"]), st.sampled_from(DTYPES))


def _layouts(kinds: tuple[str, ...]) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(0, len(kinds) - 1), min_size=4, max_size=4)


_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "seed": st.integers(0, 2**20),
    "async_op": st.booleans(),
    "wait": st.sampled_from(["wait", "seconds", "timedelta", "result", "poll"]),
    "dtype": st.sampled_from(DTYPES),
    "shape": SHAPES,
    "shapes": st.lists(SHAPES, min_size=1, max_size=4),
    "even": st.booleans(),
    "layouts": _layouts(READ_LAYOUTS),
    "out_layouts": _layouts(DENSE_LAYOUTS),
    "dense": st.integers(0, len(DENSE_LAYOUTS) - 1),
    # Which part of what is written the input lies in, where it does.
    "shared": st.one_of(st.none(), st.none(), st.integers(0, 3)),
    "root": st.integers(0, 3),
    "by_group_rank": st.booleans(),
    "sizes": st.lists(st.lists(st.integers(0, 7), min_size=4, max_size=4), min_size=4, max_size=4),
    "trailing": st.sampled_from([(), (3,), (2, 2), (150,), (0,)]),
    "entries": st.lists(
        st.fixed_dictionaries({"dtype": st.sampled_from(DTYPES), "shape": SHAPES, "one": st.booleans()}), max_size=4
    ),
    "messages": st.lists(
        st.fixed_dictionaries(
            {
                "sender": st.integers(0, 3),
                "distance": st.integers(0, 2),
                "dtype": st.sampled_from(DTYPES),
                "shape": SHAPES,
                "tagged": st.booleans(),
                "anyone": st.booleans(),
            }
        ),
        min_size=1,
        max_size=6,
    ),
    "how": st.sampled_from(["blocking", "handles", "async_op", "batch", "torch batch"]),
}
_REDUCTION: dict[str, st.SearchStrategy[Any]] = {
    "op": st.sampled_from(OPS),
    "spelling": st.one_of(st.sampled_from(["ours", "torch", "wrapped"]), st.integers(0, 20)),
    "exact": st.booleans(),
    "dtype": REDUCED,
}
_ASYNC = ("async_op", "wait")
_MOVED = ("dtype", "shape", "layouts", "out_layouts", *_ASYNC)
_ROOTED = ("root", "by_group_rank")
_ALL = property_ranks.CALLS.keys()

#: What a plan for each call says besides its group and seed; reductions have those of _REDUCTION as well.
_PLANS: dict[str, tuple[str, ...]] = {
    "all_reduce": ("shape", "dense", *_ASYNC),
    "inference_all_reduce": ("shape", "dense"),
    "reduce": ("shape", "dense", *_ROOTED, *_ASYNC),
    "broadcast": (*_MOVED, *_ROOTED),
    "all_gather": (*_MOVED, "shapes", "even", "shared"),
    "all_gather_one": ("dtype", "shape", "layouts", *_ASYNC),
    "all_gather_into_tensor": (*_MOVED, "even", "shared"),
    "gather": (*_MOVED, *_ROOTED, "shared"),
    "scatter": (*_MOVED, *_ROOTED, "shared"),
    "reduce_scatter": (*_MOVED, "shapes", "even", "shared"),
    "reduce_scatter_one": (*_MOVED, "shared"),
    "reduce_scatter_tensor": (*_MOVED, "shared"),
    "all_to_all": (*_MOVED, "sizes", "trailing"),
    "all_to_all_single": (*_MOVED, "sizes", "trailing", "even", "shared"),
    "all_reduce_coalesced": ("entries", "dense", *_ASYNC),
    "all_gather_coalesced": ("entries", "layouts", "out_layouts", *_ASYNC),
    "reduce_scatter_coalesced": ("entries", "layouts", *_ASYNC),
    "messages": ("messages", "how", "by_group_rank", "layouts", "out_layouts", "wait"),
}
_REDUCING = {name for name in _PLANS if "reduce" in name}


def test_every_call_has_a_plan() -> None:
    assert _PLANS.keys() == _ALL


def groups(world_size: int) -> st.SearchStrategy[dict[str, Any]]:
    """The world group, by either name; or some ranks in some order, made by all ranks or by the members alone."""
    world = st.fixed_dictionaries({"ranks": st.none(), "form": st.sampled_from(["none", "world"])})
    members = st.sampled_from(range(world_size))
    sizes = st.sampled_from(range(world_size, 0, -1))
    some = sizes.flatmap(lambda size: st.lists(members, min_size=size, max_size=size, unique=True))
    return st.one_of(
        world, st.fixed_dictionaries({"ranks": some, "form": st.sampled_from(["all", "members", "sorted"])})
    )


def plans(call: str, world_size: int) -> st.SearchStrategy[dict[str, Any]]:
    fields = {name: _FIELDS[name] for name in ("seed", *_PLANS[call])}
    if call in _REDUCING:
        fields |= _REDUCTION
    if "entries" in fields:
        fields.pop("dtype", None)
        if call in _REDUCING:
            fields["op"] = st.sampled_from(OPS)
            fields["entries"] = _reducible_entries()
    return st.fixed_dictionaries({"call": st.just(call), "group": groups(world_size), **fields})


def _reducible_entries() -> st.SearchStrategy[list[dict[str, Any]]]:
    """Lists of dtypes that have many operations in common, and of any."""
    kinds = [(*FLOATS, "complex64"), (*INTEGERS, "bool"), tuple(DTYPES)]
    return st.sampled_from(kinds).flatmap(
        lambda names: st.lists(st.fixed_dictionaries({"dtype": st.sampled_from(names), "shape": SHAPES}), max_size=5)
    )


def programs(calls: list[str], world_size: int, fewest: int) -> st.SearchStrategy[list[dict[str, Any]]]:
    any_plan = st.sampled_from(calls).flatmap(lambda call: plans(call, world_size))
    return st.lists(any_plan, min_size=fewest, max_size=8)


@pytest.fixture(
    scope="module",
    params=[(backend, world_size) for backend in ("gloo", "ccl") for world_size in (1, 2, 3, 4)],
    ids=lambda param: f"{param[0]}-W={param[1]}",
)
def property_pool(request: pytest.FixtureRequest, rank_environment: dict[str, Any]) -> Iterator[RankPool]:
    """Ranks that stay for all examples of one backend and world size."""
    backend, world_size = request.param
    found = dist.available_backends()[backend]
    if not found.usable:
        pytest.skip(f"{backend}: {found.reason}")
    environment = rank_environment | {"PROPERTY_BACKEND": backend}
    with RankPool(world_size, timeout_s=90, setup=property_ranks.start_rank, env=environment) as pool:
        yield pool


@pytest.fixture
def only_with_m_slow(request: pytest.FixtureRequest) -> None:
    if "slow" not in request.config.option.markexpr:
        pytest.skip("many examples: run with -m slow")


_COMMON = settings(
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
# A failure replaces all ranks, which takes seconds: what failed is shown as it is, not something smaller.
_PHASES = [phase for phase in Phase if phase not in (Phase.shrink, Phase.explain)]
FEW = settings(_COMMON, max_examples=8, derandomize=True, database=None, phases=_PHASES)
EXAMPLES = int(os.environ.get("PROPERTY_EXAMPLES", "100"))
MANY = settings(_COMMON, max_examples=EXAMPLES)


def check(pool: RankPool, calls: list[str], how_many: settings, fewest: int = 1) -> None:
    @how_many
    @given(program=programs(calls, pool.world_size, fewest), seed=st.integers(0, 1000))
    def every_program_keeps_its_promises(program: list[dict[str, Any]], seed: int) -> None:
        results = pool.run(property_ranks.run_program, program, seed)
        for number, plan in enumerate(program):
            found = {result[number] for result in results if result[number] is not None}
            assert len(found) <= 1, f"ranks got different results from {plan}"

    every_program_keeps_its_promises()


@pytest.mark.parametrize("call", _PLANS)
def test_call(property_pool: RankPool, call: str) -> None:
    # A program costs more than a call: few of them, but long.
    check(property_pool, [call], FEW, fewest=6)


def test_calls_in_any_mixture(property_pool: RankPool) -> None:
    check(property_pool, list(_PLANS), settings(FEW, max_examples=40), fewest=4)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("call", _PLANS)
def test_call_at_length(only_with_m_slow: None, property_pool: RankPool, call: str) -> None:
    check(property_pool, [call], MANY)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_calls_in_any_mixture_at_length(only_with_m_slow: None, property_pool: RankPool) -> None:
    check(property_pool, list(_PLANS), settings(MANY, max_examples=3 * EXAMPLES))
