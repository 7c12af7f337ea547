"""The memory of a process, with its part of what it shares with others; Linux."""

from __future__ import annotations

import ctypes
import gc
import threading
from pathlib import Path

__all__ = ["Peak", "give_back", "used_bytes"]

_M_MMAP_THRESHOLD = -3
_PERIOD_S = 0.01


def used_bytes() -> int:
    """Tensors and other data of this process, without files such as libraries.

    A page that several processes have mapped counts in equal parts for each (PSS).
    """
    lines = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    return sum(1024 * int(lines[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))


def give_back() -> None:
    """Let freed memory leave the process, and freed tensors at once from now on."""
    gc.collect()
    library = ctypes.CDLL(None)
    library.mallopt(_M_MMAP_THRESHOLD, 1 << 16)
    library.malloc_trim(0)


class Peak(threading.Thread):
    """The most that the process uses between ``start`` and ``stop``, sampled."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self._over = threading.Event()
        self._most = used_bytes()

    def run(self) -> None:
        while not self._over.wait(_PERIOD_S):
            self._most = max(self._most, used_bytes())

    def stop(self) -> int:
        self._over.set()
        self.join()
        return self._most
