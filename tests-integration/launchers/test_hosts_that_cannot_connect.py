"""Two of three hosts do not reach each other, while both reach the first, on which the ranks meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from comm_backend_ccl import provider
from comm_utils.testing import patience
from launchers import hosts
from launchers.hosts import Host
from launchers.launcher import reports
from launchers.processes import Command, run

_CCL = provider.availability()["ccl"]
BACKENDS = ["gloo", pytest.param("ccl", marks=pytest.mark.skipif(not _CCL.usable, reason=_CCL.reason))]
TIMEOUT_S = 4

# How host C loses the way to host B: the kernel refuses at once, or nobody answers.
REFUSED = "ip route add blackhole {address}"
SILENT = (
    "ip route add {address} via 192.0.2.99 dev eth0 onlink && "
    "ip neigh replace 192.0.2.99 lladdr 02:00:00:00:00:99 dev eth0"
)

START = """
import json, sys, time
import comm_orchestrator as dist
begin = time.monotonic()
try:
    dist.init_distributed(sys.argv[1], verbose=False, timeout=float(sys.argv[2]))
except Exception as error:
    found = {"kind": type(error).__name__, "text": str(error), "is_initialized": dist.is_initialized()}
else:
    found = {"kind": "", "text": ""}
print(json.dumps({**found, "rank": int(sys.argv[3]), "took_s": time.monotonic() - begin}), flush=True)
"""

GROUP = """
import json, subprocess, sys, time
import torch
import comm_orchestrator as dist
dist.init_distributed(sys.argv[1], verbose=False, timeout=60)
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 2:
    subprocess.run(sys.argv[4], shell=True, check=True)
dist.monitored_barrier(timeout=20)
begin = time.monotonic()
try:
    dist.new_group([0, 1, 2], timeout=float(sys.argv[2]))
except Exception as error:
    found = {"kind": type(error).__name__, "text": str(error)}
else:
    found = {"kind": "", "text": ""}
found["took_s"] = time.monotonic() - begin
if rank < 2:  # the others go on, where the library lets them
    try:
        pair = dist.new_group([0, 1])
    except dist.BackendUnavailableError as error:
        found["then"] = str(error)
    else:
        t = torch.ones(1)
        dist.all_reduce(t, group=pair)
        found["then"] = t.item()
print(json.dumps({**found, "rank": rank}), flush=True)
dist.monitored_barrier(timeout=20)
dist.destroy_process_group()
"""

CUT_OFF = """
import json, pathlib, subprocess, sys, time
import comm_orchestrator as dist
dist.init_distributed(sys.argv[1], verbose=False, timeout=60)
rank, folder = dist.get_rank(), pathlib.Path(sys.argv[4])

def wait_for(name):
    while not (folder / name).exists():
        time.sleep(0.02)

(folder / str(rank)).touch()
if rank == 0:
    wait_for("1")
    wait_for("2")
    subprocess.run(["ip", "link", "set", "port2", "down"], check=True)
    (folder / "cut").touch()
wait_for("cut")
begin = time.monotonic()
try:
    dist.new_group([0, 1, 2], timeout=float(sys.argv[2]))
except Exception as error:
    found = {"kind": type(error).__name__, "text": str(error)}
else:
    found = {"kind": "", "text": ""}
found["took_s"] = time.monotonic() - begin
dist.destroy_process_group()
print(json.dumps({**found, "rank": rank}), flush=True)
"""

INTERRUPTED = """
import json, os, signal, sys, threading, time
import torch.distributed
import comm_orchestrator as dist
if sys.argv[3] == "1":
    torch.distributed.init_process_group = lambda **arguments: time.sleep(60)
    threading.Timer(3, os.kill, (os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    dist.init_distributed(sys.argv[1], verbose=False, timeout=float(sys.argv[2]))
    text = ""
except BaseException as error:
    text = f"{type(error).__name__}: {error}"
print(json.dumps({"rank": int(sys.argv[3]), "text": text, "took_s": time.monotonic() - begin}), flush=True)
os._exit(0)
"""


@pytest.fixture
def three(request: pytest.FixtureRequest) -> Iterator[Sequence[Host]]:
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.three_hosts("hostA", "hostB", "hostC") as found:
        yield found


def _each(three: Sequence[Host], program: Sequence[str]) -> list[Command]:
    common = {"WORLD_SIZE": "3", "MASTER_ADDR": three[0].name, "MASTER_PORT": "29500"}
    return [
        host.command(
            [sys.executable, "-c", program[0], *program[1:3], str(rank), *program[3:]], {**common, "RANK": str(rank)}
        )
        for rank, host in enumerate(three)
    ]


def _names_the_pair(found: dict[str, object], address: str = "192.0.2.{}") -> bool:
    text, b, c = str(found["text"]), address.format(2), address.format(3)
    return (
        f"cannot connect rank 2 on hostC with all members: it does not reach rank 1 on hostB ({b}: " in text
        or f"cannot connect rank 1 on hostB with all members: it does not reach rank 2 on hostC ({c}: " in text
    )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("loss", [REFUSED, SILENT], ids=["refused", "silent"])
def test_every_rank_names_the_two_at_the_start(three: Sequence[Host], backend: str, loss: str) -> None:
    """gloo alone waits five times its timeout on one rank, tells another nothing and the third that all is well."""
    lose = three[2].command(["sh", "-c", loss.format(address=three[1].address)])
    subprocess.run(lose.arguments, check=True)
    said = reports(run(_each(three, [START, backend, str(TIMEOUT_S)]), 60))
    for found in said:
        assert _names_the_pair(found), found
        assert found["kind"] == ("CommTimeoutError" if loss == SILENT else "PeerLostError"), found
        assert not found["is_initialized"]
        assert found["took_s"] < (TIMEOUT_S + 6) * patience(), found
    assert "reported by" in said[0]["text"], "rank 0 reaches both"


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_names_the_two_where_there_is_ipv6_alone(three: Sequence[Host], backend: str) -> None:
    change = "ip address flush dev eth0 && ip address add 2001:db8::{}/64 dev eth0 nodad"
    for number, host in enumerate(three, 1):
        subprocess.run(host.command(["sh", "-c", change.format(number)]).arguments, check=True)
    lose = "ip neigh replace 2001:db8::2 lladdr 02:00:00:00:00:99 nud permanent dev eth0"
    subprocess.run(three[2].command(lose.split()).arguments, check=True)
    at_first = {"MASTER_ADDR": "2001:db8::1"}
    commands = [
        replace(one, environment={**one.environment, **at_first}) for one in _each(three, [START, backend, "4"])
    ]
    for found in reports(run(commands, 60)):
        assert _names_the_pair(found, "[2001:db8::{}]"), found
        assert "IPv4" not in found["text"], found


@pytest.mark.parametrize("backend", BACKENDS)
def test_every_rank_names_the_two_in_new_group_and_the_world_stays(three: Sequence[Host], backend: str) -> None:
    loss = SILENT.format(address=three[1].address)
    said = reports(run(_each(three, [GROUP, backend, str(TIMEOUT_S), loss]), 90))
    for found in said:
        assert _names_the_pair(found), found
        assert found["took_s"] < (TIMEOUT_S + 6) * patience(), found
    if backend == "gloo":
        assert [found.get("then") for found in said] == [2.0, 2.0, None]
    else:
        assert all("oneCCL still waits for the connections" in found["then"] for found in said[:2]), said


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_host_that_is_cut_off_from_the_store_ends_its_new_group(
    three: Sequence[Host], backend: str, tmp_path: Path
) -> None:
    """TCPStore waits in the kernel, which tries again for a quarter of an hour."""
    said = reports(run(_each(three, [CUT_OFF, backend, str(TIMEOUT_S), str(tmp_path)]), 90))
    for found in said:
        assert found["kind"] == "CommTimeoutError", found
        assert found["took_s"] < (TIMEOUT_S + 6) * patience(), found
        assert found["text"].startswith(f"new_group on rank {found['rank']}: ")
    assert all("[2] did not within" in found["text"] for found in said[:2]), said
    assert f"the store of the world at {three[0].address}:29500 does not answer" in said[2]["text"]


def test_a_rank_that_is_interrupted_while_it_connects_is_named(three: Sequence[Host]) -> None:
    """The others wait in gloo, and gloo in the store."""
    said = reports(run(_each(three, [INTERRUPTED, "gloo", "50"]), 90))
    assert said[1]["text"].startswith("KeyboardInterrupt")
    for found in (said[0], said[2]):
        assert "rank 1 gave up: KeyboardInterrupt" in found["text"], found
    assert max(found["took_s"] for found in said) < 10 * patience(), said
