"""A program that is no rank writes to the store of a job, or offers one of its own: real processes on loopback."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import comm_orchestrator as dist
from comm_utils.testing import RankPool, per_rank

Pools = Callable[[int], RankPool]

JOB = "hostile"
# Whoever waits for as long has not noticed.
LIMIT_S = 30.0
PATIENCE_S = 12.0

# Serves a store for each greeting, and prints their ports.
_STRANGERS_STORES = """
import json, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
limit = timedelta(seconds=5)
stores = [TCPStore("127.0.0.1", 0, None, True, limit, wait_for_workers=False) for _ in sys.argv[1:]]
for store, greeting in zip(stores, sys.argv[1:]):
    store.set("comm/server", greeting)
print(json.dumps([store.port for store in stores]), flush=True)
time.sleep(1000)
"""

# For each line, port, keys and values: waits for two ranks there, then sets keys of theirs; a number is added.
_INTRUDER = """
import json, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
print("up", flush=True)
for line in sys.stdin:
    port, changes = json.loads(line)
    end = time.monotonic() + 60
    server = None
    while server is None and time.monotonic() < end:
        try:
            store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=2), wait_for_workers=False)
            greeting = store.get("comm/server").decode()
            server = json.loads(greeting[greeting.index("{"):])
        except Exception:
            time.sleep(0.05)
    scope = f"comm/{server['id']}"
    while not store.check([f"{scope}/record/2"]):
        time.sleep(0.01)
    time.sleep(0.3)
    for key, value in changes.items():
        store.add(f"{scope}/{key}", value) if isinstance(value, int) else store.set(f"{scope}/{key}", value)
    del store
"""


def attempt(changes: dict[str, str], limit_s: float = LIMIT_S) -> tuple[str, float]:
    """Try to start once; return how it ended, and after how many seconds."""
    before, start = dict(os.environ), time.monotonic()
    os.environ.update(changes)
    try:
        dist.init_distributed("gloo", verbose=False, config={"timeouts": {"init_s": limit_s}})
    except dist.CommError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    finally:
        os.environ.clear()
        os.environ.update(before)
    tensor = torch.ones(1)
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return f"sum {tensor.item():g}", time.monotonic() - start


@contextlib.contextmanager
def program(code: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Run another process; yield it and the first line that it prints."""
    command = [sys.executable, "-c", code, *arguments]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            yield process, process.stdout.readline()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def strangers_ports() -> Iterator[dict[str, int]]:
    """``port[greeting]`` of a store that another program serves."""
    greetings = [greeting for greeting, _ in GREETINGS]
    with program(_STRANGERS_STORES, *greetings) as (_, ports):
        yield dict(zip(greetings, json.loads(ports), strict=True))


@pytest.fixture(scope="module")
def intrude() -> Iterator[Callable[[int, dict[str, Any]], None]]:
    """``intrude(port, changes)``: a program changes keys at ``port`` as soon as two ranks have written records."""
    with program(_INTRUDER) as (process, said):
        assert said == "up\n"

        def change(port: int, changes: dict[str, Any]) -> None:
            assert process.stdin is not None
            print(json.dumps([port, changes]), file=process.stdin, flush=True)

        yield change


def of_job(port: int, **changes: str) -> dict[str, str]:
    return {"MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": JOB, **changes}


GREETING = f'{{"id": "{"ab" * 16}", "job": "{JOB}", "pid": 1, "host": "here", "secret": "none"}}'


GREETINGS = [
    (GREETING, "is not that of rank 0 of this job"),
    (GREETING.replace('"none"', '"file"'), "is not that of rank 0 of this job"),
    (GREETING.replace('"none"', '"environment"'), "has COMM_JOB_SECRET in its environment"),
    ("hmac-sha256:" + "0" * 64 + " " + GREETING, "is not that of rank 0 of this job"),
    ("{", "'comm/server' is not JSON"),
    ("[" * 3000, "'comm/server' is not JSON"),
    ("[1]", "which no rank 0 writes"),
    ('{"id": 7}', "which no rank 0 writes"),
    (GREETING.replace("here", "x" * 5000), "'comm/server' has 5"),
]


@pytest.mark.parametrize(("greeting", "text"), GREETINGS)
def test_a_strangers_store_is_not_joined(
    bare_pools: Pools, strangers_ports: dict[str, int], greeting: str, text: str
) -> None:
    (first, first_s), (second, second_s) = bare_pools(2).run(attempt, of_job(strangers_ports[greeting]))
    assert first.startswith("LaunchError: init_distributed: rank 0 of 2: port ")
    assert second.startswith("LaunchError: init_distributed: rank 1 of 2: ")
    assert text in second
    assert max(first_s, second_s) < PATIENCE_S


RECORD = '{"rank": 2, "world_size": 3, "host": "here", "host_id": "here", "pid": 1}'


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"verdict": "{"}, "the record 'verdict' is not signed"),
        ({"verdict": '{"agreed": {}, "world_size": 3}'}, "the record 'verdict' is not signed"),
        ({"verdict": '{"kind": "LaunchError", "message": "stop"}'}, "the record 'verdict' is not signed"),
        ({"verdict": "7" * 200_000}, "the record 'verdict' has 200000 bytes"),
        ({"ranks": "many"}, "the store counts b'many' as 'ranks'"),
        ({"ranks": "900000000"}, "900000000 ranks are counted, of 3"),
        ({"record/3": RECORD, "ranks": 1}, "the record 'record/3' is not signed with the secret of this job"),
    ],
)
def test_a_changed_key_ends_all_ranks_alike(
    bare_pools: Pools, free_port: int, intrude: Callable[..., None], changes: dict[str, Any], text: str
) -> None:
    intrude(free_port, changes)
    # Rank 0 keeps the store open for the third rank, until it has read why as well.
    found = bare_pools(2).run(attempt, of_job(free_port, WORLD_SIZE="3", LOCAL_WORLD_SIZE="3"), limit_s=6.0)
    assert len({one for one, _ in found}) == 1, found
    assert found[0][0].startswith("LaunchError: init_distributed: ")
    assert text in found[0][0]
    assert max(took_s for _, took_s in found) < PATIENCE_S
    assert [one for one, _ in bare_pools(2).run(attempt, {})] == ["sum 2"] * 2


def secrets(*texts: str) -> Any:
    return per_rank([{"COMM_JOB_SECRET": text * 16} for text in texts])


def test_a_secret_in_the_environment(bare_pools: Pools) -> None:
    pool = bare_pools(2)
    assert [one for one, _ in pool.run(attempt, secrets("a", "a"))] == ["sum 2"] * 2
    first, second = pool.run(attempt, secrets("a", "b"), limit_s=3.0)
    assert first[0].startswith("CommTimeoutError: init_distributed: rank 1 of 2 did not come within 3 s")
    assert "says that its COMM_JOB_SECRET is not that of rank 0" in first[0]
    assert second[0].startswith("LaunchError: init_distributed: rank 1 of 2: rank 0 (pid ")
    assert "has another COMM_JOB_SECRET than this rank; set it to the same text on every rank" in second[0]
    first, second = pool.run(attempt, secrets("a", ""), limit_s=3.0)
    assert "has COMM_JOB_SECRET in its environment, and this rank has not" in second[0]
    assert [one for one, _ in pool.run(attempt, {})] == ["sum 2"] * 2
