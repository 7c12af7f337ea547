"""The end of a process whose gloo threads have not let go of their last tensor."""

import ctypes
import os
import subprocess
import sys
import threading

import pytest

from comm_utils.torch_support.gloo_workers import wait_until_idle

# The thread of gloo finds the GIL taken when it drops the tensor, until the process ends.
PROGRAM = """
import sys
import time
import torch
import torch.distributed as c10d
from comm_backend_torch import provider
from comm_utils import Setup

backend = provider.initialize(Setup("gloo", 0, 1, c10d.HashStore()))
sys.setswitchinterval(0.5)
tensors = [torch.ones(2)]
work = c10d.all_reduce(tensors[0], async_op=True)  # as DistributedDataParallel does, beside our own calls
tensors.clear()
del work
end = time.monotonic() + 0.1
while time.monotonic() < end:
    pass
"""


@pytest.mark.parametrize("end", ["", "backend.destroy_process_group()"], ids=["at once", "destroyed"])
def test_a_process_ends_after_gloo_has_let_go(end: str) -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM + end], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_threads_of_any_name() -> None:
    done = threading.Event()

    def run() -> None:
        # The kernel keeps 15 bytes of it, and so a part of a character.
        ctypes.CDLL(None).prctl(15, "aデータ読み込み".encode())
        named.set()
        done.wait()

    named, thread = threading.Event(), threading.Thread(target=run)
    thread.start()
    named.wait()
    try:
        wait_until_idle()
    finally:
        done.set()
        thread.join()
