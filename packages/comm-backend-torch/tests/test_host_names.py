"""Ranks tell each other where they are also on a host whose name is no text."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

_NAMED = r'''printf 'h\366st' > /proc/sys/kernel/hostname; exec "$@"'''
_SENDS = """
from torch.distributed import HashStore
from comm_utils.torch_support.connecting import Place

store = HashStore()
store.set("place", Place.of_this_process("").encoded())
print(Place.decoded(store.get("place").decode()).host)
"""


def test_ranks_tell_each_other_a_name_that_is_no_text() -> None:
    apart = ["unshare", "--uts", "sh", "-c", _NAMED, "sh"]
    if shutil.which(apart[0]) is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs a host name of its own")
    done = subprocess.run([*apart, sys.executable, "-c", _SENDS], capture_output=True, text=True, timeout=120)
    assert done.stdout == "h\\xf6st\n", done.stderr
