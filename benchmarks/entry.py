"""What it costs to enter native code from Python with a tensor: ctypes, and the fast path that all_reduce takes.

    python benchmarks/entry.py [--rounds N]

One process, a group of one rank, so that nothing is exchanged. ``ctypes`` is a call of libc's ``memcmp`` on no bytes,
with the address and the count that Python has asked the tensor for, as an engine behind ctypes would need; the fast
call asks the tensor itself, checks it, and does the whole all_reduce of one rank. Times are ns a call, in turns.
"""

from __future__ import annotations

import argparse
import ctypes
import statistics
import timeit
from collections.abc import Callable
from typing import Any

import torch
from measuring import positive

import comm_orchestrator as dist
from comm_utils.active import active_backend

CALLS = 20_000


def ways(tensor: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    dist.init_distributed("ccl", verbose=False)
    for _ in range(3):
        dist.inference_all_reduce(tensor)
    fast = active_backend().fast_path("all_reduce", "sum")
    if fast is None:
        raise SystemExit("this torch does not tell C about tensors (2.10 and later do), or shared memory is turned off")
    libc = ctypes.CDLL(None)
    libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    memcmp = libc.memcmp

    def by_ctypes() -> int:
        address = tensor.data_ptr()
        found: int = memcmp(address, address, tensor.numel() * 0)
        return found

    return {
        "nothing": lambda: None,
        "asking the tensor for its address and count": lambda: (tensor.data_ptr(), tensor.numel()),
        "ctypes, with that": by_ctypes,
        "fast call, with an all_reduce": lambda: fast(tensor),
        "dist.inference_all_reduce": lambda: dist.inference_all_reduce(tensor),
        "dist.all_reduce": lambda: dist.all_reduce(tensor),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=positive, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured = ways(torch.zeros(16))
    times: dict[str, list[float]] = {name: [] for name in measured}
    for _ in range(options.rounds):
        for name, way in measured.items():
            times[name].append(timeit.timeit(way, number=CALLS) / CALLS * 1e9)
    for name, found in times.items():
        print(f"{name:45} {statistics.median(found):6.0f} ns (minimum {min(found):.0f})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
