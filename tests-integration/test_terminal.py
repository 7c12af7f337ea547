"""Every table of ``commctl`` on a terminal of 80 columns: no line is wider, and no name or number is broken or cut."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comm_utils.testing import patience, run_ranks

COMMCTL = (sys.executable, "-m", "comm_orchestrator")
OPERATIONS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

JOB = """
import sys
import torch
import comm_orchestrator as dist

dist.init_distributed("gloo", verbose=False)
dist.start_trace(sys.argv[1])
for _ in range(3):
    works = [dist.all_reduce(torch.zeros(4096), async_op=True) for _ in range(3)]
    for work in works:
        work.wait()
    dist.all_gather_into_tensor(torch.zeros(2048), torch.zeros(1024))
    dist.reduce_scatter_tensor(torch.zeros(1024), torch.zeros(2048))
dist.stop_trace()
dist.destroy_process_group()
"""

OnTerminal = Callable[..., str]


@pytest.fixture(scope="module")
def on_terminal(rank_environment: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> OnTerminal:
    """Run a command in a folder of its own on a terminal of 80 columns; return what it shows, without colours."""
    folder = tmp_path_factory.mktemp("terminal")
    left_out = {"COLUMNS", "LINES", "RANK", "WORLD_SIZE", *rank_environment}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment |= {"TERM": "xterm", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}

    def call(*arguments: object, interrupt_after: str = "", code: int = 0) -> str:
        controller, terminal = pty.openpty()
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 80, 0, 0))
        process = subprocess.Popen(
            list(map(str, arguments)),
            cwd=folder,
            env=environment,
            stdin=terminal,
            stdout=terminal,
            stderr=terminal,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
        os.close(terminal)
        shown = b""
        while True:
            try:
                part = os.read(controller, 65536)
            except OSError:  # nobody has the other end any more
                break
            shown += part
            if interrupt_after and interrupt_after.encode() in shown:
                interrupt_after = ""
                process.send_signal(signal.SIGINT)
        os.close(controller)
        assert process.wait(60 * patience()) == code, shown.decode()
        text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode()).replace("\r\n", "\n")
        # A progress bar returns to the beginning of its line.
        return "\n".join(line.rpartition("\r")[2].rstrip() for line in text.splitlines())

    (folder / "job.py").write_text(JOB)
    run_ranks(str(folder / "job.py"), 2, str(folder / "trace"), env=rank_environment)
    return call


def check(shown: str, *whole: str) -> None:
    """Check the width of each line, and that ``whole`` words are shown."""
    for line in shown.splitlines():
        assert len(line) <= 80, line
    for word in whole:
        assert re.search(rf"(?<!\w){re.escape(word)}(?!\w)", shown), (word, shown)


def test_bench_fit_and_predict(on_terminal: OnTerminal) -> None:
    sizes = ("-b", 64, "-e", "100K", "-f", 8, "-n", 3, "-w", 1, "--rounds", 2, "--ranks", 2, "--backend", "gloo")
    shown = on_terminal(*COMMCTL, "bench", *OPERATIONS, *sizes, "--json", "bench.json")
    check(shown, *OPERATIONS, "algGB/s", "busGB/s", "#wrong")
    rows = [line.split() for line in shown.splitlines() if re.match(r" +\d+ (B|KiB) ", line)]
    assert len(rows) == 3 * 4 + 2 * 4  # the last two operations in place and not
    for *_, algorithm_gb_per_s, bus_gb_per_s, wrong in rows:
        assert float(algorithm_gb_per_s) > 0, "a small bandwidth has significant digits"
        assert float(bus_gb_per_s) > 0
        assert wrong == "0"
    # The sizes go over the last one.
    assert "--maxbytes 102400; 32768 is the largest of the sizes" in " ".join(shown.replace("#  ", "").split())

    shown = on_terminal(*COMMCTL, "fit", "bench.json", "-o", "model.json", "--hold-out", "sizes")
    check(shown, *OPERATIONS, "operation, how, algorithm", "residual %", "left out %", "64 B - 32 KiB")
    shown = on_terminal(
        *COMMCTL,
        "predict",
        "trace",
        "--model",
        "model.json",
        "--nodes",
        4,
        "--ranks-per-node",
        2,
        "--network",
        "5us,1Gbit",
    )
    check(shown, *OPERATIONS, "interval", "unsure", "8 on 4 hosts", "algorithm, network", "whole job")


def test_trace_summary_and_replay(on_terminal: OnTerminal) -> None:
    shown = on_terminal(*COMMCTL, "trace", "summary", "trace")
    check(shown, *OPERATIONS, "hidden", "was last", "others waited ms")
    assert len(re.findall(r"busbw\b", shown)) == 1
    shown = on_terminal(*COMMCTL, "trace", "replay", "trace", "--backend", "gloo")
    check(shown, *OPERATIONS, "total", "transfer")
    assert "the replay has moved exactly the recorded bytes" in shown


def test_doctor_backends_and_config(on_terminal: OnTerminal, tmp_path: Path) -> None:
    check(on_terminal(*COMMCTL, "doctor"), "shared_memory", "open_files", "communication", "no problems")
    check(on_terminal(*COMMCTL, "backends"), "gloo", "nccl", "usable", "remedy")
    file = tmp_path / "a_configuration_with_a_long_name.json"
    file.write_text('{"process_group": {"backend": "gloo"}, "comms_logger": {"prof_ops": ["reduce_scatter_tensor"]}}')
    shown = on_terminal(*COMMCTL, "config", "check", file, "--all")
    check(shown.replace(str(file), ""), "process_group.backend", "comms_logger.prof_ops", "compress_communication")


@pytest.mark.parametrize("command", [(), ("bench",), ("trace", "replay"), ("predict",), ("doctor",)])
def test_help(on_terminal: OnTerminal, command: tuple[str, ...]) -> None:
    shown = on_terminal(*COMMCTL, *command, "--help")
    check(shown, "--help")
    assert "<bool>" not in shown


def test_version(on_terminal: OnTerminal) -> None:
    shown = on_terminal(*COMMCTL, "--version")
    check(shown, "comm-orchestrator", "comm-utils", "torch")
    assert len(shown.splitlines()) == 7


def test_the_first_line_of_the_log(on_terminal: OnTerminal) -> None:
    program = "import comm_orchestrator as dist; dist.init_distributed(); dist.destroy_process_group()"
    shown = on_terminal(sys.executable, "-c", program)
    check(shown)
    assert re.fullmatch(r".* INFO \[rank 0\] comm: initialised: \w+, 1 rank \(no launcher\)", shown)


def test_an_interrupt_of_bench_says_so(on_terminal: OnTerminal) -> None:
    start = time.monotonic()
    options = ("-n", 100000, "--rounds", 100, "--ranks", 2, "--backend", "gloo")
    shown = on_terminal(*COMMCTL, "bench", "all_reduce", *options, interrupt_after="Using devices", code=130)
    assert shown.splitlines()[-1] == "interrupted"
    assert "Traceback" not in shown
    assert time.monotonic() - start < 60 * patience()
