"""What moving data costs: all_reduce on gloo, on oneCCL over TCP and through shared memory, and on bare oneCCL.

    python benchmarks/transports.py [--quick] [--rounds N] [--sizes BYTES ...] [--json FILE]

Two ranks, each on a core of its own, reduce float32 tensors through ``comm_orchestrator.all_reduce``; the bare ones are
``benchmarks/native/bare.cpp``, which calls the same oneCCL with the same settings. Every peer is a pair of processes
that lives as long as the measurement. A round goes through the sizes, and at each the peers run a block of calls in
turns (A B C D E), the others being blocked in a read, which their CPU time is evidence of.

Before each call its tensor is written anew and the ranks meet at two bytes in shared memory, so that they start
together whatever the library; the slower rank is what counts. So tensors up to 1 MiB are in the core's cache, larger
ones are not. The last result of each block is compared, bit for bit, with sums made in float64.

Peers read a line with the size in bytes, the calls to warm up and the calls to time, and answer with a line of numbers:
CPU time of the process before and after, in ns; wrong parts of the result; and ns for each call.
"""

from __future__ import annotations

import argparse
import gc
import json
import mmap
import os
import platform
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from measuring import (
    KIB,
    MIB,
    PERIOD,
    Meeting,
    cores,
    fill,
    free_memory_bytes,
    free_port,
    machine,
    named,
    output_file,
    positive,
)

HERE = Path(__file__).resolve().parent
CCL = HERE.parent / "packages" / "comm-backend-ccl"
SIZES_BYTES = (64, KIB, 16 * KIB, 256 * KIB, MIB, 16 * MIB, 64 * MIB, 256 * MIB)
RANKS = 2
# From here on, a call takes milliseconds.
LARGE_BYTES = 16 * MIB
# How long a rank may take to answer before it ends itself.
LIMIT_S = 120
# Of memory that a process needs for each byte of the largest tensor: its own, and what the libraries take beside it.
MEMORY_FACTOR = 3
# Of one core: above this, an idle pair of ranks is not idle. gloo's threads look around 100 times a second.
MOST_IDLE_CPU = 0.02

# name -> backend, and whether oneCCL uses shared memory; a backend of None is the bare program.
PEERS: dict[str, tuple[str | None, str]] = {
    "gloo": ("gloo", ""),
    "ccl tcp": ("ccl", "0"),
    "ccl shm": ("ccl", "1"),
    "bare tcp": (None, "0"),
    "bare shm": (None, "1"),
}
RATIOS = (("gloo", "ccl tcp"), ("gloo", "ccl shm"), ("ccl tcp", "bare tcp"), ("ccl shm", "bare shm"))


@dataclass(frozen=True)
class Target:
    """The medians' ratio ``over / under`` is to be at least, or at most, ``limit`` at every one of some sizes."""

    over: str
    under: str
    limit: float
    at_least: bool
    sizes_bytes: tuple[int, ...]


TARGETS = (
    Target("gloo", "ccl tcp", 6, True, (64,)),
    Target("gloo", "ccl tcp", 2, True, (MIB,)),
    Target("gloo", "ccl tcp", 1.3, True, (64 * MIB,)),
    Target("gloo", "ccl shm", 2.3, True, (64 * MIB,)),
    Target("gloo", "ccl tcp", 1, True, SIZES_BYTES),
    Target("gloo", "ccl shm", 1, True, SIZES_BYTES),
    Target("ccl tcp", "bare tcp", 1.1, False, tuple(size for size in SIZES_BYTES if size >= MIB)),
    Target("ccl shm", "bare shm", 1.1, False, tuple(size for size in SIZES_BYTES if size >= MIB)),
)

# --- a rank, in a process of its own


class Rank:
    """Runs blocks of calls through the public API."""

    def __init__(self, backend: str, rank: int, meeting_fd: int, largest_bytes: int) -> None:
        import torch

        import comm_orchestrator as dist

        torch.set_num_threads(1)
        dist.init_distributed(backend, verbose=False)
        if dist.get_backend() != backend:
            raise SystemExit(f"got backend {dist.get_backend()}, expected {backend}")
        self.dist: Any = dist
        self.torch: Any = torch
        self.meet = Meeting(meeting_fd, rank, RANKS)
        # Multiples of 2^-20, whose sums are exact in float32.
        of_rank = [
            torch.randint(-(2**20), 2**20, (PERIOD,), generator=torch.Generator().manual_seed(one)).double() / 2**20
            for one in (rank, 1 - rank)
        ]
        total = of_rank[0] + of_rank[1]
        # In turns, so that what is left of the call before would be wrong.
        self.inputs = [(of_rank[0] * scale).float() for scale in (1, 2)]
        self.sums = [(total * scale).float() for scale in (1, 2)]
        self.tensor = self.torch.empty(largest_bytes // 4)
        fill(self.tensor.split(PERIOD), self.inputs[0])

    def run(self, size_bytes: int, warm_up: int, timed: int) -> list[int]:
        """Make the calls; the number of wrong parts of the last result, and the nanoseconds of each timed call."""
        all_reduce, now_ns = self.dist.all_reduce, time.perf_counter_ns
        tensor = self.tensor[: size_bytes // 4]
        parts = tensor.split(PERIOD)
        times_ns = []
        for call in range(warm_up + timed):
            fill(parts, self.inputs[call % 2])
            self.meet()
            start = now_ns()
            all_reduce(tensor)
            end = now_ns()
            times_ns.append(end - start)
        sums = self.sums[(warm_up + timed - 1) % 2]
        wrong = sum(not self.torch.equal(part, sums[: part.numel()]) for part in parts)
        return [wrong, *times_ns[warm_up:]]


def serve(backend: str, meeting_fd: int, largest_bytes: int) -> None:
    """What a rank does; nothing here outlives its caller by more than ``LIMIT_S``, as an alarm ends the process."""
    signal.alarm(LIMIT_S)
    # Before any thread: what the process starts stays on its core.
    os.sched_setaffinity(0, {int(os.environ["BENCHMARK_CORE"])})
    # Its own descriptor for the protocol: oneCCL writes to stdout, too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    rank = Rank(backend, int(os.environ["RANK"]), meeting_fd, largest_bytes)
    gc.freeze()
    print(json.dumps({"torch": rank.torch.__version__}), file=answers, flush=True)
    while True:
        signal.alarm(0)
        line = sys.stdin.readline()
        cpu_before_ns = time.process_time_ns()
        signal.alarm(LIMIT_S)
        if not line:
            break
        found = rank.run(*map(int, line.split()))
        print(cpu_before_ns, time.process_time_ns(), *found, file=answers, flush=True)
    rank.dist.destroy_process_group()


# --- the peers, as the measuring process sees them


@dataclass
class Block:
    """What the two ranks of a peer answered."""

    times_us: list[float]
    wrong: int


@dataclass
class Peer:
    name: str
    processes: list[subprocess.Popen[str]] = field(default_factory=list)
    complaints: list[IO[str]] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    blocks: int = 0
    #: Since when the peer has been idle, in s, and the CPU time of its processes then, in ns.
    idle_since_s: float = 0.0
    idle_from_ns: list[int] = field(default_factory=list)
    idle_s: float = 0.0
    idle_cpu_s: float = 0.0

    def start(self, command: Sequence[str], environ: dict[str, str], meeting_fd: int) -> None:
        # Ranks are on cores, and in sessions, of their own: Ctrl-C is for the process that measures.
        for rank, core in enumerate(cores(RANKS)):
            complaints = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
            self.complaints.append(complaints)
            process = subprocess.Popen(
                command,
                env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "BENCHMARK_CORE": str(core)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                text=True,
                pass_fds=[meeting_fd],
                start_new_session=True,
            )
            self.processes.append(process)

    def answers(self) -> list[str]:
        """A line of each rank.

        Raises:
            SystemExit: a rank has ended; with what it wrote to stderr.
        """
        lines = [""] * len(self.processes)
        awaited: dict[Any, int] = {process.stdout: rank for rank, process in enumerate(self.processes)}
        while awaited:
            for answer in select.select(list(awaited), [], [])[0]:
                rank = awaited.pop(answer)
                lines[rank] = answer.readline()
                if not lines[rank]:
                    raise SystemExit(self.obituary(rank))
        return lines

    def obituary(self, rank: int) -> str:
        status = self.processes[rank].wait()
        self.complaints[rank].seek(0)
        why = f"did not answer within {LIMIT_S} s" if status == -signal.SIGALRM else f"ended with status {status}"
        return f"{self.name}, rank {rank} {why}\n{self.complaints[rank].read()[-4000:]}"

    def run(self, size_bytes: int, warm_up: int, timed: int) -> Block:
        """Let both ranks run a block, and wait for it."""
        if self.blocks:
            self.idle_s += time.monotonic() - self.idle_since_s
        for rank, process in enumerate(self.processes):
            assert process.stdin is not None
            try:
                os.write(process.stdin.fileno(), f"{size_bytes} {warm_up} {timed}\n".encode())
            except BrokenPipeError:
                raise SystemExit(self.obituary(rank)) from None
        found = [[int(word) for word in line.split()] for line in self.answers()]
        self.idle_since_s = time.monotonic()
        if self.blocks:
            self.idle_cpu_s += sum(one[0] - ns for one, ns in zip(found, self.idle_from_ns, strict=True)) / 1e9
        self.idle_from_ns = [one[1] for one in found]
        self.blocks += 1
        times_us = [max(both) / 1e3 for both in zip(*(one[3:] for one in found), strict=True)]
        return Block(times_us, sum(one[2] for one in found))

    def idle_cpu(self) -> float:
        """Of one core, what both ranks together used while they were to be idle."""
        return self.idle_cpu_s / self.idle_s if self.idle_s else 0.0


def environment(shm: str, libfabric: Path | None) -> dict[str, str]:
    """The user's own settings of the libraries stay, but for what is compared here."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    if shm:
        # What is measured is oneCCL, also between ranks of one host.
        environ |= {"CCL_SHARED_MEMORY": "0", "CCL_ATL_SHM": shm}
    if libfabric:
        environ.setdefault("CCL_OFI_LIBRARY_PATH", str(libfabric))
    return environ


def build(folder: Path) -> tuple[Path | None, str]:
    """Compile the bare program into ``folder``; None and the reason where something that it takes is missing."""
    compiler = shutil.which(os.environ.get("CXX") or "g++")
    if compiler is None:
        return None, "there is no C++ compiler (Debian: apt-get install g++; or set CXX)"
    oneccl = CCL / ".oneccl"
    archive = oneccl / "lib" / "libccl.a"
    if not archive.is_file():
        return None, f"there is no {archive} (python tools/fetch_oneccl.py gets it)"
    program, stubs = folder / "bare", folder / "stubs.o"
    includes = ["-std=c++17", "-Wall", "-Wextra", "-isystem", str(oneccl / "include")]
    libraries = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive", "-ldl", "-lpthread", "-lrt"]
    for arguments in (
        ["-x", "c", "-c", str(CCL / "native" / "oneccl" / "stubs.c"), "-o", str(stubs)],
        [*includes, str(HERE / "native" / "bare.cpp"), str(stubs), *libraries, "-o", str(program)],
    ):
        subprocess.run([compiler, "-O2", *arguments], check=True)
    return program, ""


def oneccl() -> tuple[dict[str, str], Path | None, str]:
    """What comm-backend-ccl says about oneCCL, the folder of its libraries, and why it cannot be used, or nothing."""
    try:
        from comm_backend_ccl import libraries, provider
    except ImportError as error:
        return {}, None, f"comm-backend-ccl is not installed ({error})"
    available = provider.availability()["ccl"]
    # Which of them uses shared memory differs between the peers.
    facts = {key: value for key, value in available.details.items() if not key.startswith("shared memory")}
    return facts, libraries.folder(), "" if available.usable else available.reason


@contextmanager
def started(largest_bytes: int, note: Callable[[str], None]) -> Iterator[tuple[list[Peer], dict[str, Any]]]:
    """All peers that there can be, ready; nothing of them is left afterwards, however the block ends."""
    facts, libraries, obstacle = oneccl()
    meeting_fds: list[int] = []
    peers: list[Peer] = []
    in_order = False
    try:
        # Once the ranks have started, there is no file that anything could leave behind.
        with tempfile.TemporaryDirectory(prefix="transports-") as name:
            folder = Path(name)
            program, no_program = build(folder)
            libfabric = (libraries or CCL / ".oneccl" / "lib") / "libfabric.so.1"
            for peer_name, (backend, shm) in PEERS.items():
                if missing := (no_program if backend is None else obstacle if backend == "ccl" else ""):
                    note(f"{peer_name} is left out: {missing}")
                    continue
                meeting_fds.append(os.memfd_create("meeting"))
                os.ftruncate(meeting_fds[-1], mmap.PAGESIZE)
                store = folder / peer_name.replace(" ", "-")
                store.mkdir()
                numbers = [str(meeting_fds[-1]), str(largest_bytes)]
                if backend is None:
                    command = [str(program), str(store), *numbers, str(LIMIT_S)]
                else:
                    command = [sys.executable, __file__, "--serve", backend, *numbers]
                peers.append(Peer(peer_name))
                peers[-1].start(command, environment(shm, libfabric if backend is None else None), meeting_fds[-1])
            for peer in peers:
                peer.facts = json.loads(peer.answers()[0])
        yield peers, facts
        in_order = True
    finally:
        end([process for peer in peers for process in peer.processes], in_order)
        for fd in meeting_fds:
            os.close(fd)


def end(processes: Sequence[subprocess.Popen[str]], in_order: bool) -> None:
    """End the ranks: by the end of their input where all is well, else at once."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    for process in processes:
        if in_order:
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.kill()
    late_s = time.monotonic() + 20
    for process in processes:
        try:
            process.wait(max(0.0, late_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        # libfabric's shared memory, which a process that was killed leaves behind.
        for path in Path("/dev/shm").glob(f"{process.pid}:*"):
            path.unlink(missing_ok=True)


# --- the measurement


def calls(size_bytes: int, first: bool) -> tuple[int, int]:
    """Calls to warm up, and calls to time, in one block."""
    large = size_bytes >= LARGE_BYTES
    warm_up = {(True, True): 3, (True, False): 20, (False, True): 0, (False, False): 5}[first, large]
    return warm_up, min(100, max(1, 128 * MIB // size_bytes))


def measure(
    peers: Sequence[Peer], sizes_bytes: Sequence[int], rounds: int, limit_s: float
) -> tuple[int, dict[int, dict[str, list[float]]]]:
    """Rounds made, and microseconds of every call: size -> peer -> calls; a round that might end too late is not begun.

    Raises:
        SystemExit: a result is wrong, or a rank has ended.
    """
    times_us: dict[int, dict[str, list[float]]] = {size: {peer.name: [] for peer in peers} for size in sizes_bytes}
    started_s = before_s = time.monotonic()
    longest_s = 0.0
    for done in range(rounds):
        if done and before_s - started_s + longest_s > limit_s:
            return done, times_us
        for size in sizes_bytes:
            for peer in peers:
                block = peer.run(size, *calls(size, first=not done))
                if block.wrong:
                    raise SystemExit(f"{peer.name}, {named(size)}: {block.wrong} parts of a result are wrong")
                times_us[size][peer.name] += block.times_us
        now_s = time.monotonic()
        if done:  # the first one warms up
            longest_s = max(longest_s, now_s - before_s)
        before_s = now_s
    return rounds, times_us


def affordable(sizes_bytes: Sequence[int], note: Callable[[str], None]) -> list[int]:
    """Those sizes for which there is memory."""
    free_bytes = free_memory_bytes()
    most_bytes = free_bytes // (RANKS * len(PEERS) * MEMORY_FACTOR)
    if too_large := [size for size in sizes_bytes if size > most_bytes]:
        note(f"{', '.join(map(named, too_large))}: left out, as {free_bytes // MIB} MiB of memory are free")
    return [size for size in sizes_bytes if size <= most_bytes]


Medians = dict[int, dict[str, dict[str, float]]]


def ratio(medians: Medians, size_bytes: int, over: str, under: str) -> float | None:
    found = medians.get(size_bytes, {})
    return found[over]["median_us"] / found[under]["median_us"] if over in found and under in found else None


def table(medians: Medians, names: Sequence[str], rounds: int) -> str:
    pairs = [pair for pair in RATIOS if set(pair) <= set(names)]
    head = "".join(f"{name:>22}" for name in names) + " " + "".join(f"{f'{one}/{two}':>18}" for one, two in pairs)
    lines = [
        f"all_reduce, float32, sum, {RANKS} ranks: median (minimum) of {rounds} rounds, microseconds",
        f"{'size':8}{head}",
    ]
    for size, found in medians.items():
        cells = [f"{found[name]['median_us']:.1f} ({found[name]['min_us']:.1f})" for name in names]
        ratios = [ratio(medians, size, *pair) or 0.0 for pair in pairs]
        lines.append(
            f"{named(size):8}" + "".join(f"{cell:>22}" for cell in cells) + " " + "".join(f"{x:18.2f}" for x in ratios)
        )
    return "\n".join(lines)


def verdicts(medians: Medians) -> list[dict[str, Any]]:
    """Each target, with the worst ratio of its sizes and where that was; None of both where it was not measured."""
    found = []
    for target in TARGETS:
        ratios = {size: ratio(medians, size, target.over, target.under) for size in target.sizes_bytes}
        known = {size: value for size, value in ratios.items() if value is not None}
        worst = (min if target.at_least else max)(known, key=lambda size: known[size], default=None)
        got = None if worst is None else known[worst]
        met = None if got is None else got >= target.limit if target.at_least else got <= target.limit
        sizes = [named(size) for size in target.sizes_bytes]
        where = sizes[0] if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"
        sense = "at least" if target.at_least else "at most"
        what = f"{target.over} / {target.under}, {where}: {sense} {target.limit:g}"
        found.append({"target": what, "got": got, "at_bytes": worst, "met": met, "complete": len(known) == len(sizes)})
    return found


def report(verdict: dict[str, Any]) -> str:
    if verdict["met"] is None:
        return f"  {verdict['target']:55} not measured"
    judged = "met" if verdict["met"] else "MISSED"
    if not verdict["complete"]:
        judged += " at the sizes measured"
    return f"  {verdict['target']:55} {verdict['got']:6.2f} at {named(verdict['at_bytes']):8} {judged}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive, help="default: 25, or 7 with --quick")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, in less time")
    parser.add_argument("--sizes", type=int, nargs="+", metavar="BYTES", help="default: 64 bytes to 256 MiB")
    parser.add_argument(
        "--limit-s", type=float, help="begin no round that might end later than this; default: 200, or 70 with --quick"
    )
    parser.add_argument("--json", type=output_file, help="also write everything to this file")
    parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        backend, meeting_fd, largest_bytes = options.serve
        serve(backend, int(meeting_fd), int(largest_bytes))
        return
    sizes_bytes = options.sizes or list(SIZES_BYTES)
    if any(size < 4 or size % 4 for size in sizes_bytes):
        parser.error(f"--sizes: got {sizes_bytes}, expected multiples of 4, the bytes of a float32")
    rounds = options.rounds or (7 if options.quick else 25)
    limit_s = options.limit_s or (70 if options.quick else 200)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        print(text, flush=True)

    try:
        sizes_bytes = affordable(sizes_bytes, note)
        if not sizes_bytes:
            raise SystemExit("no size is left to be measured")
        with started(max(sizes_bytes), note) as (peers, facts):
            started_s = time.monotonic()
            done, times_us = measure(peers, sizes_bytes, rounds, limit_s)
            wall_s = time.monotonic() - started_s
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    if done < rounds:
        note(f"{done} of {rounds} rounds were made, as {limit_s:g} s are the limit")

    names = [peer.name for peer in peers]
    medians = {
        size: {
            name: {"median_us": statistics.median(values), "min_us": min(values), "calls": len(values)}
            for name, values in found.items()
        }
        for size, found in times_us.items()
    }
    judged = verdicts(medians)
    print(table(medians, names, done))
    print("\n".join(map(report, judged)))
    print(f"  every result is right to the bit; measured in {wall_s:.0f} s")
    idle = {peer.name: peer.idle_cpu() for peer in peers}
    busiest, idle_s = max(idle, key=lambda name: idle[name]), min(peer.idle_s for peer in peers)
    print(f"  idle peers used {100 * idle[busiest]:.3f} % of a core at most ({busiest})")
    if idle[busiest] > MOST_IDLE_CPU and idle_s > 5:  # before that, the ends of the blocks are what is seen
        note(f"{busiest} was not idle while others were measured: these numbers are not worth much")
    if options.json:
        result = {
            "versions": {
                "python": platform.python_version(),
                **{name: version(name) for name in ("torch", "comm-orchestrator")},
                **facts,
                "of_peers": {peer.name: peer.facts for peer in peers},
            },
            "machine": machine(),
            "options": {**vars(options), "rounds": rounds, "limit_s": limit_s, "sizes": sizes_bytes, "ranks": RANKS},
            "settings": {key: value for key, value in os.environ.items() if key.startswith(("CCL_", "FI_", "GLOO_"))},
            "rounds": done,
            "wall_s": wall_s,
            "idle_cpu": idle,
            "notes": notes,
            "medians": medians,
            "verdicts": judged,
            "times_us": times_us,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
