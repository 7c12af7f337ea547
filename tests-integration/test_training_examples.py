"""The scripts of docs/examples/training: each gives the loss curve of training in one process."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from comm_utils.testing import RankPool

Pools = Callable[[int], RankPool]

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples" / "training"
STEPS = 200
# Of fp32 sums in another order, after all steps.
TOLERANCE = 1e-4
LINES = 55

# Of each script: ranks, options, and those with which plain.py trains the same model.
CASES: tuple[tuple[str, int, dict[str, int], dict[str, int]], ...] = (
    ("ddp", 2, {}, {}),
    ("data_parallel", 2, {}, {}),
    *(("sharded", 2, {"stage": stage}, {}) for stage in (1, 2, 3)),
    ("tensor_parallel", 2, {}, {}),
    ("pipeline", 2, {}, {}),
    ("data_tensor", 4, {}, {}),
    ("expert_parallel", 2, {}, {"experts": 4}),
)


def losses(script: str, backend: str, options: dict[str, int]) -> list[float]:
    """Train as the script does as a program, on ranks that have imported torch."""
    os.environ["COMM_PROCESS_GROUP__BACKEND"] = backend
    sys.path.insert(0, str(EXAMPLES))
    try:
        found: list[float] = runpy.run_path(str(EXAMPLES / f"{script}.py"))["train"](STEPS, **options)
    finally:
        sys.path.remove(str(EXAMPLES))
    return found


@pytest.fixture(scope="module")
def plain(bare_pools: Pools) -> Callable[..., list[float]]:
    """``plain(**options)``: the loss of every step in one process."""
    found: dict[tuple[tuple[str, int], ...], list[float]] = {}

    def curve(**options: int) -> list[float]:
        key = tuple(options.items())
        if key not in found:
            (found[key],) = bare_pools(1).run(losses, "plain", "gloo", options, timeout_s=240)
        return found[key]

    return curve


@pytest.mark.slow
@pytest.mark.cpu
@pytest.mark.parametrize("backend", ["gloo", "ccl"])
@pytest.mark.parametrize(
    ("script", "world_size", "options", "of_plain"),
    CASES,
    ids=["-".join([script, *map(str, options.values())]) for script, _, options, _ in CASES],
)
def test_loss_curve_is_that_of_one_process(
    bare_pools: Pools,
    plain: Callable[..., list[float]],
    script: str,
    world_size: int,
    options: dict[str, int],
    of_plain: dict[str, int],
    backend: str,
) -> None:
    expected = plain(**of_plain)
    assert expected[-1] < 0.6 * expected[0], "the model learns something that can be compared"
    for found in bare_pools(world_size).run(losses, script, backend, options, timeout_s=240):
        assert len(found) == STEPS
        off = max(abs(got - wanted) / wanted for got, wanted in zip(found, expected, strict=True))
        assert off <= TOLERANCE, f"losses differ by up to {off:.1e} of one process's"


@pytest.mark.parametrize("script", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_scripts_fit_on_a_screen(script: Path) -> None:
    if script.stem != "language_model":
        assert len(script.read_text().splitlines()) <= LINES
