"""What is asked for, and what of it is refused."""

from __future__ import annotations

from typing import Any

import pytest

from comm_orchestrator.tools.bench import options as asked
from comm_orchestrator.tools.bench.operations import benchmarks
from comm_orchestrator.tools.bench.options import Options
from comm_utils import operations, sizes
from comm_utils.errors import ArgumentError


def test_operations_are_those_of_the_file_format_and_have_sizes() -> None:
    assert tuple(benchmarks()) == operations.benchmarked()
    assert all(sizes.busbw_factor(name, 4) > 0 for name in benchmarks())


def test_names() -> None:
    assert asked.operations([]) == ("all_reduce",)
    assert asked.operations(["all_gather", "sendrecv,alltoall"]) == (
        "all_gather_into_tensor",
        "send",
        "all_to_all_single",
    )
    assert asked.operations(["all"]) == tuple(benchmarks())
    assert asked.reductions("prod,sum") == (("product", "sum"), False)
    assert asked.reductions("ALL") == (("sum", "product", "min", "max", "avg"), True)
    assert asked.dtypes("float,half,float32") == (("float32", "float16"), False)
    assert asked.root("all") == -1
    assert asked.peers("torch, torch") == ("torch",)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: asked.operations(["all_reduced"]), "OPERATION: got 'all_reduced'; expected all or some of"),
        (lambda: asked.reductions("sum,"), "--op: got ''"),
        (lambda: asked.dtypes("float128"), "--datatype: got 'float128'"),
        (lambda: asked.root("-1"), "--root: got '-1'"),
        (lambda: asked.peers("mpi"), "--peers: got 'mpi'"),
        (lambda: asked.words("--backend", "gloo,,ccl"), "--backend: got 'gloo,,ccl'"),
        (lambda: asked.check_reduces(["broadcast"], "max"), "--op: got max for broadcast"),
    ],
)
def test_unknown_names(call: Any, told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        call()


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"iters": 0}, "--iters: got 0; expected at least 1"),
        ({"warmup_iters": -1}, "--warmup_iters: got -1"),
        ({"rounds": 0}, "--rounds: got 0"),
        ({"stepfactor": 1}, "--stepfactor: got 1; expected at least 2"),
        ({"average": 4}, "--average: got 4; expected one of 0"),
        ({"minbytes": 0}, "--minbytes: got 0"),
        ({"minbytes": 16, "maxbytes": 8}, "--minbytes: got 16, above --maxbytes 8"),
        ({"dtypes": ("int32",), "ops": ("avg",)}, "--op: got avg of int32, which has no averages"),
        ({"dtypes": ("float8_e5m2",)}, "--op: got sum of float8_e5m2, which can be moved only"),
    ],
)
def test_what_cannot_be(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ArgumentError, match=told):
        Options(**values)


def test_what_cannot_be_is_left_out_of_all() -> None:
    assert Options(dtypes=("int32", "float32"), all_dtypes=True, ops=("sum", "avg"))
    assert Options(operations=("broadcast",), dtypes=("float8_e5m2",))


def test_options_reach_the_ranks_whole() -> None:
    options = Options(operations=("send", "barrier"), dtypes=("int8",), backends=("gloo",), tolerance=0.25, json="a b")
    assert Options.loads(options.dumps()) == options
