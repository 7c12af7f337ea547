"""Commands that end by a deadline, and leave no process and no file behind, whatever they start."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

# In the environment of every process that is started here. Its children inherit it, also those that leave the process
# group, as the daemons of mpirun and Slurm do, so that it finds them all.
MARKER = "LAUNCHER_TEST_MARK"

# What a launcher says to its ranks, and would say to the wrong ones if these tests were started by one themselves; and
# settings of the person who runs them.
LEFT_OUT_PREFIXES = (
    *("SLURM", "SRUN_", "SBATCH_", "SALLOC_", "OMPI_", "OPAL_", "PRTE_", "PMI", "MPI", "MV2_", "PALS_"),
    *("HYDRA_", "HYDI_", "I_MPI_", "FI_", "UCX_", "CCL_", "NCCL_", "GLOO_", "TORCHELASTIC_", "PET_", "MASTER_"),
    *("AZ_", "AZUREML_", "SM_", "GROUP_", "ROLE_", "COMM_", "DEEPSPEED_"),
)
# Importing torch takes several times as long without cached bytecode; unbuffered lines of several ranks mix.
PYTHON = ("PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED")
LEFT_OUT = frozenset(("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", *PYTHON))
SETTINGS = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


@dataclass(frozen=True)
class Command:
    """What to run; ``environment`` is added to a clean one."""

    arguments: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Finished:
    """What a command did; no ``returncode``: it had to be killed at the deadline."""

    command: Command
    returncode: int | None
    stdout: str
    stderr: str
    duration_s: float

    def __str__(self) -> str:
        ended = "killed at the deadline" if self.returncode is None else f"exit status {self.returncode}"
        parts = [f"{' '.join(self.command.arguments)}\n{ended} after {self.duration_s:.1f} s"]
        parts += [f"--- {name}\n{text}" for name, text in (("stdout", self.stdout), ("stderr", self.stderr)) if text]
        return "\n".join(parts)


def clean_environment() -> dict[str, str]:
    """The environment of the caller, without what a launcher or a person's settings may have put there."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in LEFT_OUT and not name.startswith(LEFT_OUT_PREFIXES)
    }
    return kept | SETTINGS


def run(commands: Sequence[Command], deadline_s: float) -> list[Finished]:
    """Run ``commands`` at once, each to its own end, and kill what is left of any of them after ``deadline_s``."""
    with contextlib.ExitStack() as stack:
        # Launchers keep sockets and logs in the folder for temporary files, and not all of them clean up when killed.
        # A socket's path must be short.
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="run-", ignore_cleanup_errors=True))
        mark = stack.enter_context(marked())
        # Files instead of pipes: nobody has to read meanwhile, and no daemon that keeps one open makes us wait.
        output = [[stack.enter_context(tempfile.TemporaryFile("w+", dir=folder)) for _ in "oe"] for _ in commands]
        started_s = time.monotonic()
        running = [
            subprocess.Popen(
                command.arguments,
                env={**clean_environment(), **mark, "TMPDIR": folder, **command.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            for command, (out, err) in zip(commands, output, strict=True)
        ]
        ended_s: dict[int, float] = {}
        while len(ended_s) < len(running) and (now_s := time.monotonic() - started_s) < deadline_s:
            ended_s |= {i: now_s for i, one in enumerate(running) if i not in ended_s and one.poll() is not None}
            time.sleep(0.02)
        kill_marked(mark)
        returncodes = [process.wait() for process in running]
        now_s = time.monotonic() - started_s
        return [
            Finished(command, returncode if i in ended_s else None, _text(out), _text(err), ended_s.get(i, now_s))
            for i, (command, returncode, (out, err)) in enumerate(zip(commands, returncodes, output, strict=True))
        ]


@contextlib.contextmanager
def marked() -> Iterator[dict[str, str]]:
    """A variable for the environment of processes; those that still have it in the end are killed."""
    # Where this itself runs with a mark, that one finds these processes as well.
    mark = {MARKER: f"{os.environ.get(MARKER, '')}.{uuid.uuid4().hex}"}
    try:
        yield mark
    finally:
        kill_marked(mark)


@contextlib.contextmanager
def background() -> Iterator[Callable[[Command, Path], None]]:
    """``start(command, log)`` for daemons that stay in the foreground: they run until the end of the block."""
    running: list[subprocess.Popen[bytes]] = []
    try:
        with marked() as mark:

            def start(command: Command, log: Path) -> None:
                environment = {**clean_environment(), **mark, **command.environment}
                with log.open("w") as out:
                    process = subprocess.Popen(
                        command.arguments,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=out,
                        stderr=out,
                        start_new_session=True,
                    )
                running.append(process)

            yield start
    finally:
        for process in running:
            process.wait()


def find_marked(mark: Mapping[str, str]) -> dict[int, str]:
    """The living processes with ``mark``, by pid, with their command lines."""
    (wanted,) = (f"{name}={value}".encode() for name, value in mark.items())
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        # A process may end while we look.
        with contextlib.suppress(OSError):
            if any(variable.startswith(wanted) for variable in (folder / "environ").read_bytes().split(b"\0")):
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(folder.name)] = command.strip()
    return found


def kill_marked(mark: Mapping[str, str], patience_s: float = 10) -> None:
    """Kill the processes with ``mark`` until there are none."""
    end_s = time.monotonic() + patience_s
    while found := find_marked(mark):
        if time.monotonic() > end_s:
            raise RuntimeError(f"still there {patience_s} s after they were killed: {found}")
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _text(file: TextIO) -> str:
    file.seek(0)
    return file.read()
