"""The benchmarks notice what is wrong: results of calls that communicate nothing, and ranks that end."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import comm_orchestrator as dist
from comm_utils.testing import patience, run_ranks

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import coalescing  # noqa: E402
import compressed_training  # noqa: E402
import compression  # noqa: E402
import deterministic  # noqa: E402
import first_calls  # noqa: E402
import hierarchical  # noqa: E402
import learning  # noqa: E402
from measuring import KIB, MIB  # noqa: E402
from peers import data, tasks  # noqa: E402
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


def compressed(method: str, wrong: Callable[[Any], object] | None) -> None:
    """Run the benchmark of a codec, whose compressed sums are the result of ``wrong`` instead."""
    right = dist.all_reduce

    def all_reduce(tensor: Any, *arguments: Any, compression: Any = None, **named: Any) -> None:
        if compression is None or wrong is None:
            right(tensor, *arguments, compression=compression, **named)
        else:
            wrong(tensor)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    compression.acknowledged_bytes = lambda: 0
    compression.rank_main([1 << 20], 1, [method], 1)


def test_the_page_says_which_codecs_train_worse_than_float32() -> None:
    page = compressed_training.PAGE.read_text(encoding="utf-8")
    table = page.partition(compressed_training.BEGIN)[2].partition(compressed_training.END)[0].partition("400 steps")[2]
    cells = [[cell.strip() for cell in row.split("|")] for row in table.splitlines() if row.startswith("|")]
    losses = {cell[1]: float(cell[2]) for cell in cells[2:]}
    assert list(losses) == list(compressed_training.METHODS)
    described = compressed_training.describe_losses(losses, 400)
    assert table.rstrip().endswith("\n\n" + "\n".join(described))
    assert "More than 2%" in described[0]
    assert "`onebit` (+" in described[0]
    assert "100 of 400 steps uncompressed" in described[1]


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({"float32": 2.0, "int8": 2.01}, ["All codecs are within 2% of float32's loss."]),
        ({"float32": 2.0, "int4": 2.1}, ["More than 2% above float32's loss: `int4` (+5.00%)."]),
        (
            {"float32": 2.0, "onebit": 2.1, "onebit, later": 2.08},
            ["More than 2% above float32's loss: `onebit` (+5.00%), `onebit, later` (+4.00%)."],
        ),
    ],
)
def test_losses_are_described_as_they_are(losses: dict[str, float], expected: list[str]) -> None:
    assert compressed_training.describe_losses(losses, 400) == [*expected, compressed_training.COMPUTED]


def zeroed(tensor: Any) -> None:
    tensor.zero_()


def untouched(tensor: Any) -> None:
    pass


@pytest.mark.parametrize("method", ["fp8", "onebit", "powersgd"])
def test_sums_within_the_bound_of_the_codec_pass(method: str) -> None:
    run_ranks(compressed, 2, method, None, timeout_s=60 * patience())


@pytest.mark.parametrize(
    ("method", "wrong", "message"),
    [
        ("int8", zeroed, "int8, rank [01]: got an error of .*, expected at most"),
        ("onebit", untouched, "onebit, rank [01]: got the tensor as it was, expected the sum"),
    ],
)
def test_sums_beyond_the_bound_of_the_codec_end_the_run(
    method: str, wrong: Callable[[Any], object], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(compressed, 2, method, wrong, timeout_s=60 * patience())


def without(name: str, right_calls: int, program: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    """Run a benchmark whose function ``name`` does nothing after some calls."""
    right, calls = getattr(dist, name), 0

    def function(*given: Any, **named: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= right_calls:
            right(*given, **named)

    setattr(dist, name, function)
    program(*arguments)


@pytest.mark.parametrize(
    ("ranks", "program", "arguments"),
    [
        (2, first_calls.rank_main, ("gloo", 4096, 5)),
        (3, coalescing.rank_main, ("gloo", 8, 1)),
        (2, deterministic.rank_main, ("gloo", "float16", [4096], 1)),
        (3, deterministic.rank_main, ("gloo", "float32", [4096], 1)),
        (2, learning.rank_main, ([4 * MIB], 1)),
    ],
    ids=["first calls", "coalescing", "two ranks", "three ranks", "learning"],
)
def test_right_results_pass(ranks: int, program: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    run_ranks(program, ranks, *arguments, timeout_s=60 * patience())


@pytest.mark.parametrize(
    ("name", "program", "arguments", "message"),
    [
        ("all_gather_into_tensor", first_calls.rank_main, ("gloo", 4096, 5), "all_gather_into_tensor, call 2, rank"),
        ("reduce_scatter_tensor", first_calls.rank_main, ("gloo", 4096, 5), "reduce_scatter_tensor, call 2, rank"),
        ("all_to_all_single", first_calls.rank_main, ("gloo", 4096, 5), "all_to_all_single, call 2, rank"),
        ("all_reduce_coalesced", coalescing.rank_main, ("gloo", 8, 1), "in a list, rank 0: got .* wrong elements"),
        ("all_reduce", deterministic.rank_main, ("gloo", "float32", [4096], 1), "mode off, rank 0: got .* wrong"),
        ("all_reduce", learning.rank_main, ([4 * MIB], 1), "learning, 4 MiB, rank [01]: got a wrong sum"),
    ],
)
def test_calls_that_do_nothing_end_the_run(
    name: str, program: Callable[..., object], arguments: tuple[Any, ...], message: str
) -> None:
    with pytest.raises(AssertionError, match=message):
        run_ranks(without, 2, name, 1, program, arguments, timeout_s=60 * patience())


def steps(name: str | None, right_calls: int) -> None:
    """Run the benchmark of hierarchical calls, without a link, where ``name`` does nothing after some calls."""
    hierarchical.acknowledged_bytes = lambda: 0
    if name is None:
        hierarchical.rank_main([64 * KIB], 1)
    else:
        without(name, right_calls, hierarchical.rank_main, ([64 * KIB], 1))


def test_right_results_of_hierarchical_calls_pass() -> None:
    run_ranks(steps, 2, None, 0, timeout_s=60 * patience())


@pytest.mark.parametrize(
    ("name", "operation"),
    [
        ("all_reduce", "all_reduce"),
        ("reduce_scatter_tensor", "reduce_scatter"),
        ("all_gather_into_tensor", "all_gather"),
        ("broadcast", "broadcast"),
    ],
)
def test_hierarchical_calls_that_do_nothing_end_the_run(name: str, operation: str) -> None:
    with pytest.raises(AssertionError, match=f"{operation} of 64 KiB, gloo, rank [01]: got a wrong result"):
        run_ranks(steps, 2, name, 0, timeout_s=60 * patience())


def calls_of_a_codec(size_bytes: int) -> int:
    """Return how many calls the benchmark makes of a codec in one round of a size."""
    compression.acknowledged_bytes = lambda: 0
    compression._UNTIMED, compression._SMALL_ROUNDS = 0, 1
    right, calls = dist.all_reduce, 0

    def all_reduce(*arguments: Any, compression: Any = None, **named: Any) -> None:
        nonlocal calls
        calls += compression is not None
        right(*arguments, compression=compression, **named)

    dist.all_reduce = all_reduce  # type: ignore[assignment]
    compression.rank_main([size_bytes], 1, ["fp16"], 1)
    return calls


def test_a_round_of_a_small_tensor_is_many_calls() -> None:
    # Of one call of 64 KiB, the kernel's tick decides. One more turn counts bytes.
    for size_bytes, calls in ((64 * KIB, 64), (4 * MIB, 1)):
        assert run_ranks(calls_of_a_codec, 2, size_bytes, timeout_s=60 * patience()) == [2 * calls] * 2


MARKS = "{begin}\nold\n{end}\n"


def written(program: Any, arguments: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the lines about targets that a benchmark writes."""
    page = tmp_path / "page.md"
    page.write_text(MARKS.format(begin=program.BEGIN, end=program.END))
    monkeypatch.setattr(program, "PAGE", page)
    program.main([*arguments, "--write"], lambda _: None)
    _, _, targets = page.read_text().partition("Targets:\n\n")
    return targets.removesuffix(f"{program.END}\n").strip().splitlines()[2:]


def test_the_page_on_compression_says_which_targets_are_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(rate: str, ranks: int, sizes: Sequence[int], rounds: int, codecs: Sequence[str]) -> Any:
        def times_as_fast(name: str) -> float:
            return 1.0 if "float32" in name else 2.0

        def of_size(size: int) -> compression.Found:
            names = [
                "float32",
                *codecs,
                *([compression.ON_CCL] if ranks == 2 and codecs[0].startswith(compression.CHOSEN) else []),
            ]
            return {
                name: {
                    "s": [(1 + 0.01 * one) / times_as_fast(name) for one in range(rounds)],
                    "bytes": 104 if name == "int8" else 102,
                    "expected": None if "float32" in name or name.startswith(compression.CHOSEN) else 100,
                    "error": 0.0,
                }
                for name in names
            }

        found = {size: of_size(size) for size in sizes}
        if ranks == 2 and 64 * KIB in found:  # beside float32 on ccl, which is faster than gloo there
            found[64 * KIB][compression.ON_CCL]["s"] = [0.2] * rounds
        return found

    monkeypatch.setattr(compression, "measured", measured)
    lines = written(compression, [], tmp_path, monkeypatch)
    assert [line.replace("**", "").split(" | ")[0].strip("| ") for line in lines[:6]] == [
        "fp16: at least 1.9 times as fast as float32",
        "int8: at least 3.8 times as fast as float32",
        "int4: at least 7 times as fast as float32",
        "onebit: at least 12 times as fast as float32",
        "bytes sent: the codec's within 3%",
        "chosen by the library: never slower than float32",
    ]
    assert lines[0].endswith("| 1 Gbit/s, one rank a host | 2.00 (2.00 to 2.00) | met |")
    assert lines[1].endswith("| 1 Gbit/s, one rank a host | 2.00 (2.00 to 2.00) | **missed** |")
    assert lines[4].endswith("| 1 Gbit/s, one rank a host, int8 | 1.040 | **missed** |")
    assert lines[5].endswith("| met |")
    assert "| fp16 between hosts: at least 1.9" in lines[6]
    assert lines[10].endswith("fp16 between hosts | 1.020 | met |")
    assert "2 ranks a host, 64 KiB, fp16 between hosts | 0.39 (0.38 to 0.40)" in lines[11]
    assert lines[11].endswith("| **missed** |")
    assert [line.split(" |")[0] for line in lines[12:]] == [
        "| int8: at least 1.5 times as fast as float32",
        "| bytes sent: the codec's within 3%",
        "| chosen by the library: never slower than float32",
        "| int8 between hosts: at least 1.5 times as fast as float32",
        "| bytes sent: the codec's within 3%",
        "| chosen by the library: never slower than float32",
    ]


def test_the_page_on_hierarchical_calls_says_which_targets_are_met(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ms = {
        "gloo": 20.0,
        "gloo, hierarchical": 10.0,
        "gloo, chosen": 16.0,
        "oneCCL": 30.0,
        "shared memory and oneCCL": 10.0,
        "chosen": 10.0,
    }

    def measured(rate: str, host_of: list[int], sizes: list[int], rounds: int) -> hierarchical.Found:
        found: hierarchical.Found = {
            (operation, size): {name: {"s": [one] * rounds, "bytes": size} for name, one in ms.items()}
            for operation, size in hierarchical.tasks(sizes)
        }
        if host_of == hierarchical.NUMBERED["round-robin"]:
            found["broadcast", 16 * MIB]["shared memory and oneCCL"]["bytes"] = 17 * MIB
            found["all_reduce", 4 * KIB]["chosen"]["s"] = [31.0] * rounds
        return found

    monkeypatch.setattr(hierarchical, "measured", measured)
    lines = written(hierarchical, [], tmp_path, monkeypatch)
    verdicts = [line.split(" | ")[-1].rstrip(" |") for line in lines]
    assert verdicts == [
        *("met", "**missed**", "met", "met", "met"),
        *("**missed**", "**missed**", "met", "**missed**", "**missed**"),
    ]
    assert "1.4 times as fast as gloo's ring | host by host, all_reduce 16 MiB, gloo, chosen | 1.25" in lines[1]
    assert "2.5 times as fast as gloo's ring | round-robin, all_reduce 16 MiB, gloo, hierarchical | 2.00" in lines[5]
    assert "round-robin, broadcast 16 MiB, shared memory and oneCCL | 1.062" in lines[8]
    assert "never slower than in one step | round-robin, all_reduce 4 KiB, chosen | 0.97" in lines[9]


def test_the_page_on_learning_says_which_targets_are_met(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(sizes: Sequence[int], rounds: int) -> learning.Found:
        found = {size: {name: [1.0] * rounds for name in learning.GROUPS} for size in sizes}
        found[MIB][learning.LEARNING] = [1.005] * rounds
        found[16 * MIB][learning.LEARNING][1] = 1 + 0.01 * rounds  # one trial that costs 2 % of every other round
        return found

    monkeypatch.setattr(learning, "measured", measured)
    above, small = written(learning, [], tmp_path, monkeypatch)
    assert re.fullmatch(r"\| learning, above 8 KiB: .* \| 16 MiB, beside .* \| 0\.98 .* \| \*\*missed\*\* \|", above)
    assert re.fullmatch(r"\| learning, up to 8 KiB: .* \| 4 KiB, beside .* \| 1\.00 .* \| met \|", small)


def test_the_page_on_inference_sums_up_the_targets_of_its_tables() -> None:
    page = (BENCHMARKS.parent / "docs" / "inference.md").read_text(encoding="utf-8")
    before, _, results = page.partition("## Results")
    of_processors = [
        dict(re.findall(r"^\| (.*?) \| .*?(met|\*\*missed\*\*) +\|$", one, re.MULTILINE))
        for one in results.split("\n### ")[1:]
    ]
    # In the order of the columns: as the page names the machines, whereas results are in the order of measurement.
    columns = [of_processors[one] for one in (0, 2, 1, 3, 4)]
    rows = [
        row.strip("| ").split(" | ")
        for row in before.splitlines()
        if row.startswith(("| AutoTP, c", "| AutoTP, t", "| torch, c", "| torch, t"))
    ]
    assert len(rows) == 6
    for target, *verdicts in rows:
        assert verdicts == [one.get(target, "not measured") for one in columns], target


@pytest.mark.parametrize("dtype", ["float32", *tasks.SHORT_TYPES])
def test_sums_that_grow_from_call_to_call_stay_in_range(dtype: str) -> None:
    found = data.Data(0, 2)
    for task in (one for one in tasks.work(2, None) if one.operation == "all_reduce" and one.dtype == dtype):
        block = tasks.Block.of(task, first=True, quick=False, slow=False)
        for number in (0, 1):
            scale = found.scale(task, number) * 2.0 ** (block.calls - 1)
            assert found.values(dtype, None, scale).isfinite().all(), task


@pytest.mark.parametrize("program", [coalescing, deterministic], ids=lambda program: program.__name__)
@pytest.mark.parametrize("left", ["begin", "end"])
def test_a_page_without_a_mark_is_not_written(
    program: Any, left: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"before\n{getattr(program, left.upper())}\nold\nafter\n")
    before = page.read_text()
    monkeypatch.setattr(program, "PAGE", page)
    monkeypatch.setattr(program, "LIBRARIES", {})  # nothing is measured
    with pytest.raises(SystemExit, match=r"got no lines .* expected both"):
        program.main(["--write"], lambda _: None)
    assert page.read_text() == before
