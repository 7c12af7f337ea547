"""The options of ``commctl bench``."""

from __future__ import annotations

import shlex
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from comm_orchestrator.tools.bench import options as asked
from comm_orchestrator.tools.bench import scan
from comm_utils.errors import ArgumentError

__all__ = ["BenchCommand", "bench"]

_SIZES, _WHAT, _HOW, _WHERE, _OUTPUT = "Sizes", "Operations", "Measuring", "Ranks and libraries", "Output"


class BenchCommand(TyperCommand):
    """``-I`` stands for ``-I 1``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        given: list[str] = []
        for number, word in enumerate(args):
            given.append(word)
            following = args[number + 1] if number + 1 < len(args) else ""
            if word in ("-I", "--per_iter_timing") and not following.isdecimal():
                given.append("1")
        return super().parse_args(ctx, given)


def bench(
    operations: Annotated[
        list[str] | None, typer.Argument(metavar="[OPERATION]...", help="all_reduce where none is given; all for all.")
    ] = None,
    minbytes: Annotated[
        str,
        typer.Option("-b", "--minbytes", help="Smallest size: bytes, or such as 4K, 1M, 1G.", rich_help_panel=_SIZES),
    ] = "8",
    maxbytes: Annotated[
        str, typer.Option("-e", "--maxbytes", help="Largest size, likewise.", rich_help_panel=_SIZES)
    ] = "64M",
    stepfactor: Annotated[
        int | None,
        typer.Option("-f", "--stepfactor", help="Factor between sizes, 2 by default.", rich_help_panel=_SIZES),
    ] = None,
    stepbytes: Annotated[
        str | None,
        typer.Option(
            "-i", "--stepbytes", help="Bytes between sizes, such as 4K, instead of a factor.", rich_help_panel=_SIZES
        ),
    ] = None,
    op: Annotated[
        str | None,
        typer.Option(
            "-o", "--op", help="sum (default), product (or prod), min, max, avg, a list, or all.", rich_help_panel=_WHAT
        ),
    ] = None,
    datatype: Annotated[
        str,
        typer.Option("-d", "--datatype", help="A name of torch or nccl-tests, a list, or all.", rich_help_panel=_WHAT),
    ] = "float32",
    root: Annotated[
        str, typer.Option("-r", "--root", help="Rank of the group that is the root, or all.", rich_help_panel=_WHAT)
    ] = "0",
    iters: Annotated[int, typer.Option("-n", "--iters", help="Timed calls a round.", rich_help_panel=_HOW)] = 20,
    warmup_iters: Annotated[
        int, typer.Option("-w", "--warmup_iters", help="Untimed calls before them.", rich_help_panel=_HOW)
    ] = 5,
    rounds: Annotated[int, typer.Option(help="Rounds, in which the libraries take turns.", rich_help_panel=_HOW)] = 5,
    check: Annotated[
        int, typer.Option("-c", "--check", help="Checked calls a round; 0: none.", rich_help_panel=_HOW)
    ] = 1,
    average: Annotated[
        int,
        typer.Option(
            "-a", "--average", help="Of the ranks' times: 0 rank 0's, 1 average, 2 min, 3 max.", rich_help_panel=_HOW
        ),
    ] = 1,
    per_iter_timing: Annotated[
        int,
        typer.Option(
            "-I",
            "--per_iter_timing",
            help="1, or nothing: time each call, and show min, p50, p99 and max.",
            rich_help_panel=_HOW,
        ),
    ] = 0,
    timeout: Annotated[
        float,
        typer.Option(
            "-T", "--timeout", help="Seconds that a line of the table may take; 0: no limit.", rich_help_panel=_HOW
        ),
    ] = 0.0,
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks to start here; by default 2, or one for each CUDA device.", rich_help_panel=_WHERE),
    ] = None,
    backend: Annotated[
        str | None,
        typer.Option(
            help="A list, such as gloo,ccl; by default the choice of init_distributed().", rich_help_panel=_WHERE
        ),
    ] = None,
    group_size: Annotated[
        int | None,
        typer.Option(
            help="Groups of so many neighbouring ranks, all at once; by default one group of all.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    peers: Annotated[
        str | None,
        typer.Option(
            help="APIs to measure beside this one: a list of torch, mpi4py, deepspeed; by default none.",
            rich_help_panel=_WHERE,
        ),
    ] = None,
    compression: Annotated[
        str | None,
        typer.Option(
            help="Codecs to measure side by side: a list such as none,int8; by default none, no compression.",
            rich_help_panel=_WHAT,
        ),
    ] = None,
    json: Annotated[
        str, typer.Option("-J", "--json", metavar="FILE", help="Write everything.", rich_help_panel=_OUTPUT)
    ] = "",
    csv: Annotated[str, typer.Option(metavar="FILE", help="Write a table.", rich_help_panel=_OUTPUT)] = "",
    plot: Annotated[
        str,
        typer.Option(metavar="FILE.{png,svg}", help="Draw time and bandwidth against size.", rich_help_panel=_OUTPUT),
    ] = "",
    compare: Annotated[
        str,
        typer.Option(metavar="OLD.json", help="Compare with an earlier --json.", rich_help_panel=_OUTPUT),
    ] = "",
    tolerance: Annotated[
        str | None,
        typer.Option(help="How much slower than before is no finding; 10% by default.", rich_help_panel=_OUTPUT),
    ] = None,
) -> None:
    """Measure collectives as nccl-tests does, and check their results.

    Without a launcher it starts its own ranks; under torchrun, mpirun or srun it runs in theirs, and rank 0 prints.

    \b
    commctl bench                                    all_reduce, 8 B to 64 MiB
    commctl bench all -b 1K -e 1M -d float,bfloat16  every operation, two types
    commctl bench broadcast -e 64K -I                times of single calls
    commctl bench --backend gloo,ccl --peers torch   side by side, in turns
    commctl bench --compression none,int8            beside compressed calls
    commctl bench --ranks 4 --group-size 2           two groups at once
    commctl bench --json new.json --plot new.svg     for programs and people
    commctl bench --compare old.json                 slower than before?
    torchrun --nproc-per-node 4 -m comm_orchestrator bench
    mpirun -n 2 commctl bench --peers mpi4py         beside an MPI

    A result is slower than before where its time exceeds the old one by more than the tolerance and no round of the two
    runs overlaps: the fastest now took longer than the slowest then.

    Exit code: 0, 1 where a result is wrong or slower than before or a rank failed, 2 for wrong usage.
    """
    try:
        names = asked.operations(operations or [])
        if stepfactor is not None and stepbytes is not None:
            raise ArgumentError(f"got --stepfactor {stepfactor} and --stepbytes {stepbytes}; expected one of them")
        if tolerance is not None and not compare:
            raise ArgumentError(f"--tolerance: got {tolerance} without --compare; expected both, or neither")
        for name, value in (("--ranks", ranks), ("--group-size", group_size)):
            if value is not None and value < 1:
                raise ArgumentError(f"{name}: got {value}; expected at least 1")
        if per_iter_timing not in (0, 1):
            raise ArgumentError(f"--per_iter_timing: got {per_iter_timing}; expected 0 or 1")
        step = scan.parse_size("--stepbytes", stepbytes) if stepbytes is not None else 0
        if stepbytes is not None and not step:
            raise ArgumentError(f"--stepbytes: got {stepbytes}; expected at least 1 byte")
        if op is not None:
            asked.check_reduces(names, op)
        ops, all_ops = asked.reductions(op or "sum")
        dtypes, all_dtypes = asked.dtypes(datatype)
        options = asked.Options(
            operations=names,
            minbytes=scan.parse_size("--minbytes", minbytes),
            maxbytes=scan.parse_size("--maxbytes", maxbytes),
            stepfactor=2 if stepfactor is None else stepfactor,
            stepbytes=step,
            iters=iters,
            warmup_iters=warmup_iters,
            check=check,
            dtypes=dtypes,
            all_dtypes=all_dtypes,
            ops=ops,
            all_ops=all_ops,
            root=asked.root(root),
            average=average,
            per_iteration=bool(per_iter_timing),
            timeout_s=scan.duration_s("--timeout", timeout),
            ranks=ranks or 0,
            backends=asked.words("--backend", backend),
            group_size=group_size or 0,
            peers=asked.peers(peers),
            compressions=asked.words("--compression", compression),
            rounds=rounds,
            json=json,
            csv=csv,
            plot=plot,
            compare=compare,
            tolerance=0.1 if tolerance is None else scan.percentage("--tolerance", tolerance),
            command=shlex.join(["commctl", *sys.argv[1:]]),
        )
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    from comm_orchestrator.tools.bench.command import run

    raise typer.Exit(run(options))
