"""The textbook costs, against the formulas of the papers and against each other."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from comm_utils import operations
from comm_utils.observability.cost_model.algorithms import PHASES, candidates, rounds_of
from comm_utils.observability.cost_model.rounds import Shape, flows

CASES = [
    (operation, algorithm) for operation in operations.benchmarked() for algorithm in candidates(operation, "intra")
]


def flat(operation: str, algorithm: str, ranks: int) -> tuple[float, float]:
    rounds = rounds_of(operation, algorithm, Shape(ranks))
    return sum(one.messages for one in rounds), sum(one.share for one in rounds)


# Thakur, Rabenseifner, Gropp 2005, for p a power of two.
@pytest.mark.parametrize("p", [2, 4, 8, 64, 1024])
@pytest.mark.parametrize(
    ("operation", "algorithm", "messages", "share"),
    [
        ("all_reduce", "ring", lambda p, lg: 2 * (p - 1), lambda p, lg: 2 * (p - 1) / p),
        ("all_reduce", "recursive doubling", lambda p, lg: lg, lambda p, lg: lg),
        ("all_reduce", "Rabenseifner", lambda p, lg: 2 * lg, lambda p, lg: 2 * (p - 1) / p),
        ("all_gather_into_tensor", "ring", lambda p, lg: p - 1, lambda p, lg: (p - 1) / p),
        ("all_gather_into_tensor", "recursive doubling", lambda p, lg: lg, lambda p, lg: (p - 1) / p),
        ("reduce_scatter_tensor", "recursive halving", lambda p, lg: lg, lambda p, lg: (p - 1) / p),
        ("broadcast", "binomial tree", lambda p, lg: lg, lambda p, lg: lg),
        ("broadcast", "scatter and ring", lambda p, lg: lg + p - 1, lambda p, lg: 2 * (p - 1) / p),
        ("reduce", "Rabenseifner", lambda p, lg: 2 * lg, lambda p, lg: 2 * (p - 1) / p),
        ("all_to_all_single", "pairwise exchange", lambda p, lg: p - 1, lambda p, lg: (p - 1) / p),
        ("all_to_all_single", "Bruck", lambda p, lg: lg, lambda p, lg: lg / 2),
        ("gather", "binomial tree", lambda p, lg: lg, lambda p, lg: (p - 1) / p),
        ("barrier", "recursive doubling", lambda p, lg: lg, lambda p, lg: 0),
    ],
)
def test_formulas(operation, algorithm, messages, share, p):
    found = flat(operation, algorithm, p)
    lg = math.log2(p)
    assert found == (pytest.approx(messages(p, lg)), pytest.approx(share(p, lg)))


@pytest.mark.parametrize(("operation", "algorithm"), CASES)
@given(ranks=st.integers(2, 70))
def test_every_algorithm_moves_what_has_to_move(operation, algorithm, ranks):
    """No rank can have the result without its part of the data: lower bounds of Chan et al. 2007, section 3."""
    messages, share = flat(operation, algorithm, ranks)
    assert messages >= 1
    least = {"barrier": 0, "send": 1, "broadcast": 1, "reduce": 1, "all_reduce": 1}.get(operation, (ranks - 1) / ranks)
    assert share >= least - 1e-9


@pytest.mark.parametrize(("operation", "algorithm"), [case for case in CASES if case[0] not in ("send", "barrier")])
@given(nodes=st.integers(2, 9), per_node=st.integers(1, 9))
def test_hosts_share_the_work_but_lose_none(operation, algorithm, nodes, per_node):
    """Messages and bytes of a rank are those of the flat algorithm; those that leave a host are marked."""
    shape = Shape(nodes * per_node, nodes)
    rounds = rounds_of(operation, algorithm, shape)
    messages, share = flat(operation, algorithm, shape.ranks)
    assert sum(one.messages for one in rounds) == pytest.approx(messages)
    assert sum(one.share for one in rounds) == pytest.approx(share)
    assert any(one.leaving > 0 for one in rounds)
    # A host's link carries at least one, and at most all, of its ranks' bytes: more only where all read one rank.
    for one in rounds:
        if one.leaving:
            assert one.leaving <= max(per_node, shape.ranks) * one.share + 1e-9
    if per_node == 1:
        assert all(one.leaving for one in rounds)


def test_every_operation_that_can_be_called_has_a_cost():
    for name in operations.recorded():
        assert candidates(operations.get(name).measured_as, "intra")
    known = [one for row in operations.rows() for one in row.pattern.algorithms]
    assert {phase for one in known for phase in one.phases} == set(PHASES)


def test_one_rank_sends_nothing_but_calls():
    assert flat("all_reduce", "local", 1) == (1, 1)
    assert flat("barrier", "local", 1) == (1, 0)
    with pytest.raises(KeyError):
        rounds_of("all_reduce", "telepathy", Shape(2))


@pytest.mark.parametrize("per_node", range(1, 10))
@pytest.mark.parametrize("distance", [1, 2, 4, 8, 16])
def test_flows_bound_the_partners_on_other_hosts(per_node: int, distance: int) -> None:
    nodes = 8
    hosts = [range(node * per_node, (node + 1) * per_node) for node in range(nodes)]
    leaving = [sum(rank ^ distance not in host for rank in host) for host in hosts]
    found = flows(Shape(nodes * per_node, nodes), distance)
    assert max(leaving) <= found <= per_node
    assert (found == 0) == (max(leaving) == 0)
