"""Targets of the tests of the runner; apart from them, so that ranks need not import pytest."""

from __future__ import annotations

import atexit
import functools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from comm_utils.testing import RankPool, run_ranks

STATE: list[str] = []


def my_rank() -> int:
    return int(os.environ["RANK"])


def rank_plus(offset: int, *, factor: int = 1) -> int:
    return (my_rank() + offset) * factor


def variables(*names: str) -> dict[str, str | None]:
    return {name: os.environ.get(name) for name in names}


def raise_on(rank: int) -> str:
    if my_rank() == rank:
        raise ValueError(f"rank {rank} has a problem")
    return "fine"


def raise_everywhere() -> None:
    raise ValueError(f"rank {my_rank()} has a problem")


def hang_on(rank: int, seconds: float = 60.0) -> str:
    print(f"about to work on {my_rank()}")
    if my_rank() == rank:
        the_slow_part(seconds)
    return "done"


def the_slow_part(seconds: float) -> None:
    time.sleep(seconds)


def raise_and_hang(folder: Path) -> None:
    """Rank 1 raises once rank 0 hangs."""
    if my_rank() == 1:
        while not (folder / "hanging").exists():
            time.sleep(0.02)
        raise RuntimeError("first")
    (folder / "hanging").touch()
    the_slow_part(60)


def raise_late(seconds: float) -> None:
    time.sleep(seconds * my_rank())
    raise RuntimeError(f"report of rank {my_rank()}")


def hard_exit(code: int) -> None:
    print("leaving hard")
    os._exit(code)


def soft_exit(code: int) -> None:
    sys.exit(code)


def exit_at_exit(code: int) -> str:
    atexit.register(os._exit, code)
    return "returned all the same"


def hang_at_exit() -> str:
    threading.Thread(target=the_slow_part, args=(60,)).start()
    return "returned all the same"


def kill_self(signal_number: int) -> None:
    os.kill(os.getpid(), signal_number)
    time.sleep(60)


def stop_self() -> None:
    """Neither ends nor answers."""
    os.kill(os.getpid(), signal.SIGSTOP)


def big(size_bytes: int) -> bytes:
    return bytes([my_rank()]) * size_bytes


def length(data: bytes) -> int:
    return len(data)


def unpicklable() -> object:
    return threading.Lock()


def speak() -> None:
    print("said on stdout")
    print("said on stderr", file=sys.stderr)
    os.write(1, "from below: \u00e4\n".encode())


def print_much() -> None:
    for line in range(1000):
        print(f"line {line}")
    raise RuntimeError("after much output")


def read_stdin() -> str:
    return sys.stdin.read()


def leave_a_note_at_exit(folder: Path) -> None:
    atexit.register((folder / f"{my_rank()}").write_text, "left")


def imported_modules() -> list[str]:
    return list(sys.modules)


class Pair:
    """A class that only this file defines."""

    def __init__(self, left: int, right: int) -> None:
        self.left = left
        self.right = right

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and (self.left, self.right) == (other.left, other.right)

    __hash__ = None  # type: ignore[assignment]


class PairError(Exception):
    """Likewise."""


class StubbornError(Exception):
    """Cannot be rebuilt from what it keeps."""

    def __init__(self, left: int, right: int) -> None:
        super().__init__(f"{left} and {right}")


class MuteError(Exception):
    """Cannot even say what it is."""

    def __str__(self) -> str:
        return str(1 / 0)


def raise_mute() -> None:
    raise MuteError


def stubborn() -> StubbornError:
    return StubbornError(1, 2)


def swap(pair: Pair) -> Pair:
    return Pair(pair.right, pair.left)


def raise_pair_error() -> None:
    raise PairError("mine")


def raise_stubborn() -> None:
    raise StubbornError(1, 2)


def pid() -> int:
    return os.getpid()


def port() -> str:
    return os.environ["MASTER_PORT"]


def add(left: int, right: int) -> int:
    return left + right


def prepare(word: str) -> None:
    print("preparing")
    STATE.append(word)


def state() -> list[str]:
    return STATE


def fail_once(marker: Path) -> None:
    if my_rank() == 0 and not marker.exists():
        marker.touch()
        raise RuntimeError("not prepared")


def raise_if(condition: bool) -> str:
    if condition:
        raise ValueError(f"rank {my_rank()} refuses")
    return "fine"


def below(value: int, limit: int) -> int:
    if value >= limit:
        raise ValueError(f"{value} is not below {limit}")
    return value


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def exit_soon() -> int:
    threading.Timer(0.05, os._exit, [9]).start()
    return os.getpid()


def say(word: str) -> None:
    print(word)


def exit_badly_at_exit() -> int:
    atexit.register(os._exit, 6)
    return 1


def announce(folder: Path, name: str) -> None:
    unfinished = folder / f"{name}.tmp"
    unfinished.write_text(str(os.getpid()))
    unfinished.rename(folder / f"{name}.pid")


def announce_and_sleep(folder: Path) -> None:
    announce(folder, os.environ["RANK"])
    time.sleep(60)


def start_children(folder: Path, outcome: str) -> None:
    """One child in the rank's session, one that left it."""
    code = "import sys, time; print('on', flush=True); time.sleep(60)"
    for name, leave in (("inside", False), ("outside", True)):
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, start_new_session=leave)
        assert child.stdout is not None
        child.stdout.readline()
        (folder / f"{name}.pid").write_text(str(child.pid))
    if outcome == "raise":
        raise RuntimeError("with children")
    if outcome == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # no complaint about unfinished children


def nested(folder: Path) -> None:
    """A run inside a rank, which dies in the middle of it."""
    threading.Thread(target=run_ranks, args=(announce_and_sleep, 2, folder)).start()
    while len(list(folder.glob("*.pid"))) < 2:
        time.sleep(0.02)
    os.kill(os.getpid(), signal.SIGKILL)


def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any) -> Any:
        return "decorated", function(*args)

    return wrapper


@decorate
def decorated(value: int) -> int:
    return value


class Holder:
    """Functions inside a class."""

    @staticmethod
    def static(value: int) -> int:
        return value + 1

    def method(self) -> None: ...


def to_be_replaced() -> None: ...


ORIGINAL = to_be_replaced
to_be_replaced = len  # type: ignore[assignment]


if __name__ == "__main__":
    kind, directory = sys.argv[1], Path(sys.argv[2])
    if kind == "RankPool":
        with RankPool(2) as the_pool:
            the_pool.run(announce_and_sleep, directory)
    elif kind == "thread":
        worker = threading.Thread(target=run_ranks, args=(announce_and_sleep, 2, directory))
        worker.start()
        worker.join()
    else:
        run_ranks(announce_and_sleep, 2, directory)
