"""oneCCL between hosts: over which network, with which results and how fast, and what a lost host does to the other."""

from __future__ import annotations

import functools
import json
import math
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from comm_backend_ccl import provider
from comm_utils.testing import patience
from launchers import hosts, torchrun
from launchers.hosts import Host
from launchers.launcher import reports
from launchers.processes import Command, Finished, run

_CCL = provider.availability()["ccl"]
pytestmark = pytest.mark.skipif(not _CCL.usable, reason=_CCL.reason)

# Networks that both hosts have and that lead from neither to the other: a bridge as Docker makes it, and one that is as
# fast as the real one and comes first by its name. The hosts have the same addresses there.
DECOYS = """
set -e
ip link add docker0 type bridge
ip address add 172.17.0.1/16 dev docker0
ip link set docker0 up
ip link add decoy0 type veth peer decoy1
ip address add 203.0.113.7/24 dev decoy0
ip link set decoy0 up
ip link set decoy1 up
"""

# The same program for both libraries and for both ways to write it. Sums are exact: all numbers are small integers.
SCRIPT = """
import json, os, socket, sys
from datetime import timedelta
from pathlib import Path
import psutil, torch

way = sys.argv[1]
if way == "torch":
    import comm_backend_ccl
    import torch.distributed as dist
    dist.init_process_group("ccl", timeout=timedelta(seconds=10))
else:
    import comm_orchestrator as dist
    dist.init_distributed(way, verbose=False, timeout=10)
rank, size = dist.get_rank(), dist.get_world_size()
half = size // 2
random = torch.Generator().manual_seed(rank)

def some(n, dtype=torch.float32):
    return torch.randint(-50, 50, (n,), generator=random).to(dtype)

def digest(t):
    return [t[:3].tolist(), int((t.long() * torch.arange(1, t.numel() + 1)).sum())]

def sent():
    return {path.name: int((path / "statistics/tx_bytes").read_text()) for path in Path("/sys/class/net").iterdir()}

results = {}
for n in (1, 1000, 300_000):
    t = some(n)
    dist.all_reduce(t)
    results[f"all_reduce {n}"] = digest(t)
    t, parts = some(n, torch.int64), [torch.empty(n, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(parts, t)
    results[f"all_gather {n}"] = [digest(part) for part in parts]
    for src in range(size):
        t = some(n, torch.float64)
        dist.broadcast(t, src)
        results[f"broadcast {n} from {src}"] = digest(t)
    t, out = some(n * size), torch.empty(n * size)
    dist.all_to_all_single(out, t)
    results[f"all_to_all_single {n}"] = digest(out)
    # Messages there and back between the hosts, then within each.
    for distance in {half, 1}:
        peer = rank ^ distance
        t, out = some(n), torch.empty(n)
        for step in (0, 1):
            dist.send(t, peer) if (rank < peer) == (step == 0) else dist.recv(out, peer)
        results[f"message {n} of {peer}"] = digest(out)
t, out = some(sum(rank + 1 for peer in range(size))), torch.empty(sum(peer + 1 for peer in range(size)))
dist.all_to_all_single(out, t, [peer + 1 for peer in range(size)], [rank + 1] * size)
results["all_to_all_single of different sizes"] = digest(out)
for members in ([0, size - 1], list(range(half)), list(range(half, size))):
    group = dist.new_group(members)
    if rank in members:
        t = some(1000)
        dist.all_reduce(t, group=group)
        results[f"all_reduce of {members}"] = digest(t)
dist.barrier()
before = sent()
t = torch.ones(2 << 20)
dist.all_reduce(t)
after = sent()
results["8 MiB"] = [t.min().item(), t.max().item()]
own = psutil.Process().net_connections("tcp")
bare = lambda address: address.ip.removeprefix("::ffff:")
connected = [one for one in own if one.status == psutil.CONN_ESTABLISHED]
between = [one for one in connected if 29500 not in (one.laddr.port, one.raddr.port)]
facts = {
    "rank": rank,
    "host": socket.gethostname(),
    "results": results,
    "interface": os.environ.get("FI_TCP_IFACE"),
    "sent": {name: after[name] - before[name] for name in after},
    "listens": sorted({bare(one.laddr) for one in own if one.status == psutil.CONN_LISTEN and one.laddr.port != 29500}),
    "from": sorted({bare(one.laddr) for one in between}),
    "to": sorted({bare(one.raddr) for one in between}),
}
dist.barrier()
dist.destroy_process_group()
print(json.dumps(facts), flush=True)
"""

# Runs a command and says what is left of it on this host, where nothing else runs.
WATCH = """
import json, os, subprocess, sys, time
import psutil

def found():
    sockets = [one for one in psutil.net_connections("tcp") if one.status in ("LISTEN", "ESTABLISHED")]
    return {
        "processes": [pid for pid in psutil.pids() if pid not in before],
        "shared memory": os.listdir("/dev/shm"),
        "sockets": [f"{one.laddr} {one.raddr} {one.status}" for one in sockets],
    }

before = psutil.pids()
status = subprocess.run(sys.argv[1:]).returncode
end = time.monotonic() + 3
while any((left := found()).values()) and time.monotonic() < end:
    time.sleep(0.05)
print(json.dumps({"rank": 1000, "left": left}), flush=True)
sys.exit(status)
"""

Hosts: TypeAlias = tuple[Host, Host]


@pytest.fixture(scope="module")
def decoyed() -> Iterator[Hosts]:
    """Two hosts that share one network, and have two others each."""
    if reason := hosts.missing():
        pytest.skip(reason)
    with hosts.two_hosts("hostA", "hostB") as both:
        for host in both:
            _call(host, DECOYS)
        yield both


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scripts")
    for name, text in {"program": SCRIPT, "watch": WATCH, "shaped": SHAPED, "lost": LOST}.items():
        (path / f"{name}.py").write_text(text)
    return path


def _call(host: Host, script: str) -> None:
    done = subprocess.run(host.command(["sh", "-c", script]).arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def _each(both: Hosts, program: Sequence[str], environment: Mapping[str, str] | None = None) -> list[Command]:
    """A rank on each of the two, as a person would start them."""
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": both[0].name, "MASTER_PORT": "29500", **(environment or {})}
    return [host.command([sys.executable, *program], {**common, "RANK": str(rank)}) for rank, host in enumerate(both)]


@functools.cache
def _by_torchrun(both: Hosts, folder: Path, way: str, ranks: int) -> list[dict[str, Any]]:
    """What the ranks of the program said, by rank, after a look at what is left on each host."""
    agents = torchrun.over_hosts(both).commands([sys.executable, str(folder / "program.py"), way], ranks)
    watched = []
    for agent in agents:
        at = agent.arguments.index(sys.executable)
        watch = [sys.executable, str(folder / "watch.py")]
        watched.append(Command([*agent.arguments[:at], *watch, *agent.arguments[at:]], agent.environment))
    said = reports(run(watched, 90))
    left = [report["left"] for report in said if "left" in report]
    assert left == [{"processes": [], "shared memory": [], "sockets": []}] * 2
    return [report for report in said if "left" not in report]


@pytest.mark.parametrize("ranks", [2, 4])
def test_results_are_those_of_gloo_and_nothing_is_left(decoyed: Hosts, folder: Path, ranks: int) -> None:
    found, expected = (_by_torchrun(decoyed, folder, way, ranks) for way in ("ccl", "gloo"))
    assert [one["rank"] for one in found] == list(range(ranks))
    assert [one["host"] for one in found] == [decoyed[rank * 2 // ranks].name for rank in range(ranks)]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine["results"] == theirs["results"]
        assert mine["results"]["8 MiB"] == [ranks, ranks]


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_network_is_the_one_that_leads_to_the_others(decoyed: Hosts, folder: Path, ranks: int) -> None:
    addresses = sorted(host.address for host in decoyed)
    for found in _by_torchrun(decoyed, folder, "ccl", ranks):
        (own,) = (host.address for host in decoyed if host.name == found["host"])
        assert found["interface"] == "eth0"
        assert found["listens"] == [own]
        assert found["from"] == [own]
        # What two ranks of one host say to each other leaves over no network.
        assert found["to"] == (addresses if ranks == 4 else [one for one in addresses if one != own])
        assert found["sent"]["eth0"] >= 4 << 20
        assert max(found["sent"][name] for name in ("docker0", "decoy0", "decoy1")) < 1 << 16


NAMED = """
import json, os
import psutil, torch
import comm_orchestrator as dist
dist.init_distributed("ccl", verbose=False, timeout=10)
t = torch.ones(2)
dist.all_reduce(t)
own = psutil.Process().net_connections("tcp")
listens = sorted({one.laddr.ip for one in own if one.status == psutil.CONN_LISTEN and one.laddr.port != 29500})
print(json.dumps({"rank": dist.get_rank(), "t": t.tolist(), "listens": listens}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("name", "address"), [({}, "127.0.0.1"), ({"GLOO_SOCKET_IFNAME": "decoy0"}, "203.0.113.7")], ids=["none", "decoy0"]
)
def test_on_one_host_it_is_the_loopback_interface_or_the_named_one(
    decoyed: Hosts, name: dict[str, str], address: str
) -> None:
    here = decoyed[0]
    on_oneccl = {"CCL_SHARED_MEMORY": "0", **name}
    for found in reports(run(_each((here, here), ["-c", NAMED], on_oneccl), 60)):
        assert found["t"] == [2.0, 2.0]
        assert found["listens"] == [address]


def test_torchs_own_initialisation_takes_that_network_too(decoyed: Hosts, folder: Path) -> None:
    """Nobody has set FI_TCP_IFACE there."""
    finished = run(_each(decoyed, [str(folder / "program.py"), "torch"]), 20)
    expected = [one["results"] for one in _by_torchrun(decoyed, folder, "gloo", 2)]
    assert [one["results"] for one in reports(finished)] == expected


def test_torchs_own_initialisation_where_there_is_one_network(two_hosts: Hosts, folder: Path, decoyed: Hosts) -> None:
    finished = run(_each(two_hosts, [str(folder / "program.py"), "torch"]), 60)
    expected = [one["results"] for one in _by_torchrun(decoyed, folder, "gloo", 2)]
    assert [one["results"] for one in reports(finished)] == expected


# --- a slow network

SHAPED = """
import json, sys, time
import torch
import comm_orchestrator as dist

dist.init_distributed(sys.argv[1], verbose=False, timeout=60)
rank, n = dist.get_rank(), 16 << 20
values = torch.arange(n, dtype=torch.float32) % 1024
took_s = []
for iteration in range(int(sys.argv[2])):
    t = values * (rank + 1)
    dist.barrier()
    begin = time.perf_counter()
    dist.all_reduce(t)
    took_s.append(time.perf_counter() - begin)
    assert torch.equal(t, values * 3), iteration
print(json.dumps({"rank": rank, "took_s": took_s}), flush=True)
dist.destroy_process_group()
"""
SIZE_BYTES = 64 << 20


@contextmanager
def _shaped(both: Hosts, gbit_per_s: float) -> Iterator[None]:
    try:
        for host in both:
            burst = int(gbit_per_s * 256)
            _call(host, f"tc qdisc add dev eth0 root tbf rate {gbit_per_s}gbit burst {burst}kb latency 20ms")
        yield
    finally:
        for host in both:
            _call(host, "tc qdisc del dev eth0 root")


@pytest.mark.parametrize("gbit_per_s", [1, 10])
def test_all_reduce_over_a_link_of_so_many_gbit_per_s(decoyed: Hosts, folder: Path, gbit_per_s: int) -> None:
    """Each of two ranks sends as many bytes as the tensor has; a link carries that both ways at once."""
    with _shaped(decoyed, gbit_per_s):
        said = reports(run(_each(decoyed, [str(folder / "shaped.py"), "ccl", "4"]), 90))
    took_s = min(max(times) for times in zip(*(one["took_s"] for one in said), strict=True))
    least_s = SIZE_BYTES * 8 / (gbit_per_s * 1e9)
    print(f"64 MiB at {gbit_per_s} Gbit/s: {took_s:.3f} s, algbw {SIZE_BYTES / took_s / 1e9:.3f} GB/s")
    assert took_s >= 0.9 * least_s  # what the bucket of tbf holds comes at once
    # Over the faster link, what two shared cores can do decides.
    most_s = 3 * least_s if gbit_per_s == 1 else 1
    assert took_s <= most_s * patience()


# --- a host that is late

LATE = """
import json, time
import torch
import comm_orchestrator as dist
dist.init_distributed("ccl", verbose=False, timeout=3)
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
if rank == 1:
    time.sleep(6)
begin = time.monotonic()
try:
    for _ in range(2):  # what rank 0 gave up has left it before, and may reach rank 1
        dist.all_reduce(torch.ones(1))
    text = ""
except dist.CommTimeoutError as error:
    text = str(error)
took_s = time.monotonic() - begin
if rank == 0:  # which has the store
    time.sleep(8)
print(json.dumps({"rank": rank, "text": text, "took_s": took_s}), flush=True)
"""


def test_who_comes_after_the_others_gave_up_does_not_wait_in_turn(decoyed: Hosts) -> None:
    first, late = reports(run(_each(decoyed, ["-c", LATE]), 60))
    assert "timed out after 3 s, as seen by rank 0: rank 1 (pid " in first["text"]
    assert "failed, as seen by rank 1: another rank gave up earlier: rank 1 (pid " in late["text"]
    assert late["took_s"] < 1.5 * patience()


# --- a host that is lost

LOST = """
import json, os, signal, sys, threading, time
import torch
import comm_orchestrator as dist

victim, when, ending = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_distributed("ccl", verbose=False, timeout=3)
rank = dist.get_rank()
t = torch.ones(1 << 22)
dist.all_reduce(t)
dist.barrier()
report = {"rank": rank}
if rank == victim:
    die = lambda: os.kill(os.getpid(), signal.SIGKILL)
    if when == "before its call":
        time.sleep(0.5)
        die()
    threading.Timer(0.5, die).start()
begin = time.monotonic()
try:
    while True:
        dist.all_reduce(t)
        begin = time.monotonic()
except dist.CommError as error:
    report |= {"error": type(error).__name__, "text": str(error), "took_s": time.monotonic() - begin}
try:
    dist.all_reduce(t)
except dist.CommError as error:
    report["then"] = type(error).__name__
print(json.dumps(report), flush=True)
if ending == "destroys":
    dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("victim", "when", "ending"),
    [
        (1, "before its call", "ends"),
        (1, "in the middle", "destroys"),
        (0, "before its call", "destroys"),
        (0, "in the middle", "ends"),
    ],
)
def test_a_rank_that_is_killed_on_the_other_host(
    decoyed: Hosts, folder: Path, victim: int, when: str, ending: str
) -> None:
    """Nothing tells its death but the end of connections, and the time limit."""
    finished = run(_each(decoyed, [str(folder / "lost.py"), str(victim), when, ending]), 40)
    killed, survivor = finished[victim], finished[1 - victim]
    assert killed.returncode == -9, killed
    assert survivor.returncode == 0, survivor
    assert survivor.duration_s < 20 * patience(), survivor
    found = _said(survivor)
    assert found["error"] in ("CommTimeoutError", "PeerLostError"), survivor
    assert found["took_s"] < 10 * patience(), survivor
    assert found["then"] == "BrokenGroupError", survivor
    assert not any(line in survivor.stderr for line in ("terminate called", "Segmentation", "Fatal Python")), survivor


def _said(finished: Finished) -> dict[str, Any]:
    (line,) = (line for line in finished.stdout.splitlines() if line.startswith("{"))
    found: dict[str, Any] = json.loads(line)
    assert all(math.isfinite(value) for value in found.values() if isinstance(value, float))
    return found
