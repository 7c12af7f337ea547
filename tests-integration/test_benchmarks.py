"""The benchmarks notice what is wrong: results of calls that communicate nothing, and ranks that end."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

from training import cli as training  # noqa: E402

# A rank of bench-training with a fault in the data-parallel hooks.
TRAINER = f"""
import sys
sys.argv[0] = {str(BENCHMARKS / "training" / "__main__.py")!r}
sys.path[:0] = [{str(BENCHMARKS)!r}, {str(BENCHMARKS.parent / "docs" / "examples" / "training")!r}]
import comm_orchestrator as dist
from peers.rank import serve
from training import engines
from training.trainer import Trainer
{{fault}}
serve(sys.argv[2], Trainer)
"""
NOTHING_IS_AVERAGED = """
class Handle:
    remove = staticmethod(lambda: None)
dist.register_data_parallel_hooks = lambda model: Handle
"""
ANOTHER_LEARNING_RATE = """
right = engines.ENGINES["data_parallel"]
def wrong(model):
    engines.LR *= 1.5
    return right(model)
engines.ENGINES["data_parallel"] = wrong
"""


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (NOTHING_IS_AVERAGED, "data-parallel hooks, 0.1 million parameters, round 1: rank 1 got other parameters than"),
        (ANOTHER_LEARNING_RATE, "data-parallel hooks, 0.1 million parameters, round 1: got a loss of .* as with DDP"),
    ],
    ids=["no communication", "learning rate"],
)
def test_training_that_differs_ends_the_run(
    fault: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "rank.py"
    program.write_text(TRAINER.format(fault=fault))
    monkeypatch.setattr(training, "PROGRAM", program)
    with pytest.raises(SystemExit, match=message):
        training.main(["--quick", "--only", "ddp", "--memory", "--rounds", "1"])
