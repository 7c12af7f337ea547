"""torch's own analyzer, unchanged, reads dumps made from rings of real processes, and finds what is wrong."""

from __future__ import annotations

import gc
import io
import logging
import pickle
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comm_utils.errors import ArgumentError
from comm_utils.flight_recorder import open_ring, rings_in
from comm_utils.flight_recorder.layout import LARGEST_RECORDS
from comm_utils.flight_recorder.snapshot import RankSnapshot, take_snapshot
from comm_utils.flight_recorder.torch_dump import torch_dumps, write_torch_dumps
from comm_utils.testing.recording import Plan, Writer, call, writers
from comm_utils.testing.ring import Ring

pytest.importorskip("torch.distributed.flight_recorder")


def snapshots_of(folder: Path) -> list[RankSnapshot]:
    found = []
    for path in rings_in(folder):
        reader = open_ring(path)
        found.append(take_snapshot(reader, recent=LARGEST_RECORDS))
        reader.close()
    return found


def fr_trace(folder: Path, *options: str) -> str:
    """What ``python -m torch.distributed.flight_recorder.fr_trace FOLDER`` prints, in this process to save time."""
    from torch.distributed.flight_recorder.fr_trace import main

    printed = io.StringIO()
    handler = logging.StreamHandler(printed)
    logging.getLogger("Flight Recorder").addHandler(handler)
    try:
        with suppress(SystemExit):
            main([str(folder), *options])
    finally:
        logging.getLogger("Flight Recorder").removeHandler(handler)
        gc.enable()  # which fr_trace turns off
    return printed.getvalue()


def nothing(_: list[Writer]) -> None:
    pass


def analyzed(
    tmp_path: Path, plans: dict[int, Plan], before: Callable[[list[Writer]], None] = nothing, **settings: Any
) -> str:
    """What fr_trace says about the dumps of these ranks."""
    with writers(tmp_path / "rings", plans, **settings) as ranks:
        before(ranks)
        write_torch_dumps(snapshots_of(tmp_path / "rings"), tmp_path / "dumps")
    return fr_trace(tmp_path / "dumps")


STEP = [call("done", "broadcast", 8, root=0), call("done", "all_reduce", 1000, op="sum"), call("done", "barrier", 0)]
HANGS = call("open", "all_reduce", 1000, op="sum", caller="train_step")


def test_a_rank_that_does_not_call(tmp_path: Path) -> None:
    found = analyzed(tmp_path, {0: [*STEP, HANGS], 1: STEP, 2: [*STEP, HANGS]})
    assert "Not all ranks joining collective, sequence number: 4" in found
    assert "missing ranks: {1}" in found
    assert "collective: gloo:all_reduce" in found
    assert "train_step at train.py:2" in found
    assert "world (gloo)" in found


@pytest.mark.parametrize("last", [[], [HANGS]], ids=["before its call", "in its call"])
def test_a_rank_that_was_killed(tmp_path: Path, last: Plan) -> None:
    plans = {0: [*STEP, HANGS], 1: [*STEP, *last], 2: [*STEP, HANGS]}
    found = analyzed(tmp_path, plans, lambda ranks: ranks[1].kill())
    assert "Not all ranks joining collective, sequence number: 4" in found
    assert "missing ranks: {1}" in found


def test_a_call_in_which_a_rank_was_killed_stays_where_it_differs(tmp_path: Path) -> None:
    plans = {0: [*STEP, HANGS], 1: [*STEP, call("open", "all_reduce", 999)], 2: [*STEP, HANGS]}
    found = analyzed(tmp_path, plans, lambda ranks: ranks[1].kill())
    assert "Error type: SIZE_OR_SYNTAX_MISMATCH" in found


def test_nothing_wrong(tmp_path: Path) -> None:
    parts: Plan = [
        call("done", "all_gather", 3),
        call("done", "all_gather_into_tensor", 3),
        call("done", "reduce_scatter_tensor", 5),
        call("done", "all_to_all_single", 2),
        call("done", "reduce", 2, root=1),
        call("done", "gather", 2, root=1),
        call("done", "scatter", 2, root=1),
        call("done", "all_reduce", 1, dtype="bfloat16"),
        *STEP,
    ]
    uneven = [
        call("done", "all_to_all_single", 0, sent=[1, 3], received=[1, 5]),
        call("done", "all_to_all_single", 0, sent=[5, 2], received=[3, 2]),
    ]
    found = analyzed(tmp_path, {0: [*parts, uneven[0]], 1: [*parts, uneven[1]]})
    assert found == ""
    dump = pickle.loads((tmp_path / "dumps" / "rank_1").read_bytes())
    assert [one["collective_seq_id"] for one in dump["entries"]] == list(range(1, 13))
    sizes = {one["profiling_name"]: (one["input_sizes"], one["output_sizes"]) for one in dump["entries"]}
    assert sizes["gloo:gather"] == ([[2]], [[4]])
    assert sizes["gloo:all_to_all"] == ([[7]], [[5]])


def test_operations_without_a_row_are_left_out(tmp_path: Path) -> None:
    with writers(tmp_path, dict.fromkeys(range(2), STEP)):
        snapshots = snapshots_of(tmp_path)
    unknown = [
        replace(one, calls=tuple(replace(c, operation="of_a_plugin") if c.in_series == 2 else c for c in one.calls))
        for one in snapshots
    ]
    for dump in torch_dumps(unknown).values():
        assert [one["collective_seq_id"] for one in dump["entries"]] == [1, 3]


def test_messages_are_matched_in_pairs(tmp_path: Path) -> None:
    plans: dict[int, Plan] = {
        # Other ranks of the group take no part, one message is early, one is for any source.
        0: [
            call("done", "send", 4, peer=1, tag=7),
            call("done", "recv", 2, peer=2),
            call("done", "send", 1, peer=2, tag=9),
        ],
        1: [call("done", "recv", 4, peer=0, tag=7), call("done", "send", 5, peer=0)],
        2: [call("done", "send", 2, peer=0), call("done", "recv", 1, peer=-1, tag=9), call("open", "recv", 3, peer=1)],
    }
    found = analyzed(tmp_path, plans)
    assert found.count("Not all ranks joining") == 1
    assert "missing ranks: {1}" in found
    assert "collective: gloo:recv 1<-0" in found


def analyzed_rings(tmp_path: Path, rings: list[Ring]) -> str:
    write_torch_dumps([take_snapshot(ring.reader, recent=LARGEST_RECORDS) for ring in rings], tmp_path / "dumps")
    return fr_trace(tmp_path / "dumps")


def test_messages_of_native_code_are_matched_in_pairs(tmp_path: Path) -> None:
    rings = [Ring(rank, 64, 3) for rank in range(3)]
    for tag in (7, 7, 8):
        rings[0].native_call("send", 4, root=1, tag=tag)
        rings[1].native_call("recv", 4, root=0, tag=tag)
    rings[2].native_call("recv", 4, root=1, tag=7)
    rings[1].native_call("send", 4, root=2, tag=7)
    rings[2].native_call("recv", 5, root=1, tag=7, state="failed")
    found = analyzed_rings(tmp_path, rings)
    assert found.count("Not all ranks joining collective, sequence number: ") == 1
    assert "Not all ranks joining collective, sequence number: 2\n" in found
    assert "from 1 to 2 tag 7" in found
    assert "missing ranks: {1}" in found
    assert "collective: gloo:recv 1<-0" in found


def test_of_overwritten_messages_of_native_code_those_that_hang_are_left(tmp_path: Path) -> None:
    rings = [Ring(rank, 16, 2) for rank in range(2)]
    for _ in range(12):
        rings[0].native_call("send", 4, root=1)
        rings[1].native_call("recv", 4, root=0)
        rings[1].native_call("barrier", group="of one")
    rings[1].native_call("recv", 5, root=0, state="open")
    found = analyzed_rings(tmp_path, rings)
    assert found.count("Not all ranks joining") == 1
    assert "missing ranks: {0}" in found
    assert "collective: gloo:recv 1<-0" in found


def test_rings_that_have_wrapped_are_aligned(tmp_path: Path) -> None:
    sub = [["group", "pair", [0, 1]]]
    calls = [call("done", "all_reduce", 4) for _ in range(20)]
    plans: dict[int, Plan] = {
        0: [*sub, *calls, *[call("done", "all_reduce", 4, "pair") for _ in range(30)]],
        1: [*sub, *calls, *[call("done", "all_reduce", 4, "pair") for _ in range(30)]],
        2: calls,
    }
    with writers(tmp_path / "rings", plans, records=32):
        snapshots = snapshots_of(tmp_path / "rings")
    dumps = torch_dumps(snapshots)
    assert {len(dumps[rank]["entries"]) for rank in (0, 1)} <= {24, 32}
    # What ranks 0 and 1 have overwritten is no longer compared on rank 2.
    first = {rank: [e["collective_seq_id"] for e in dumps[rank]["entries"] if e["process_group"][0] == "world"][:1]
             for rank in dumps}  # fmt: skip
    assert first[0] == first[1] == first[2]
    write_torch_dumps(snapshots, tmp_path / "dumps")
    assert "Not all ranks" not in fr_trace(tmp_path / "dumps")


def test_entries_print(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed.flight_recorder.components import utils

    # Without this package, torch 2.13 fails in -j.
    monkeypatch.setattr(utils, "tabulate", lambda rows, headers: f"{headers} {rows}", raising=False)
    analyzed(tmp_path, {0: [*STEP, HANGS], 1: STEP})
    printed = fr_trace(tmp_path / "dumps", "-j", "--print_stack_trace")
    assert "all_reduce(input_sizes=[[1000]], state=started)" in printed
    assert "broadcast(input_sizes=[[8]], state=completed)" in printed


def test_the_same_fields_as_torch(tmp_path: Path) -> None:
    """A dump has the keys of torch's own, of which fr_trace needs no more."""
    program = (
        "import os, pickle, sys, torch, torch.distributed as d\n"
        "d.init_process_group('gloo', init_method=f'file://{sys.argv[1]}', rank=0, world_size=1)\n"
        "d.all_reduce(torch.ones(3))\n"
        "d.destroy_process_group()\n"
        "open(sys.argv[2], 'wb').write(torch._C._distributed_c10d._dump_fr_trace())\n"
    )
    store, out = tmp_path / "store", tmp_path / "torch"
    subprocess.run(
        [sys.executable, "-c", program, str(store), str(out)], check=True, env={"TORCH_FR_BUFFER_SIZE": "100"}
    )
    theirs = pickle.loads(out.read_bytes())
    if theirs["version"] != "2.10":
        pytest.skip(f"this torch writes version {theirs['version']}")
    analyzed(tmp_path, {0: [call("done", "all_reduce", 3)]})
    ours = pickle.loads((tmp_path / "dumps" / "rank_0").read_bytes())
    assert set(ours) == set(theirs)
    unknown = {"thread_id", "thread_name", "timeout_ms"}
    assert set(theirs["entries"][0]) - unknown == set(ours["entries"][0]) - {"duration_ms"}
    same = ("input_sizes", "input_dtypes", "output_sizes", "output_dtypes", "profiling_name", "is_p2p", "p2p_seq_id")
    assert [ours["entries"][0][name] for name in same] == [theirs["entries"][0][name] for name in same]
    assert {type(one) for one in ours["pg_status"]} == {type(one) for one in theirs["pg_status"]}
    assert set(next(iter(ours["pg_config"].values()))) == set(next(iter(theirs["pg_config"].values())))


def test_a_folder_with_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rank_7").write_bytes(b"of an earlier job")
    with pytest.raises(ArgumentError, match="expected an empty one"):
        write_torch_dumps([], tmp_path)
