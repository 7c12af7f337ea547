"""The name of a host is text that stores and terminals take, whatever its bytes are."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys

import pytest

from comm_utils.host_identity import host_name

_NAMED = 'printf "$1" > /proc/sys/kernel/hostname; shift; exec "$@"'
_SAYS = "from comm_utils.host_identity import host_name; print(ascii(host_name()))"


def printed_on(octal: str, program: str) -> str:
    """Return what a program prints on a host whose name has these bytes."""
    apart = ["unshare", "--uts", "sh", "-c", _NAMED, "sh", octal]
    if shutil.which(apart[0]) is None or subprocess.run([*apart, "true"], capture_output=True).returncode:
        pytest.skip("needs a host name of its own")
    command = [*apart, sys.executable, "-X", "utf8", "-c", program]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=120).stdout


def test_the_name_of_this_host() -> None:
    assert host_name() == socket.gethostname()


@pytest.mark.parametrize(
    ("octal", "name"),
    [("h\\303\\266st", "höst"), ("h\\366st", r"h\xf6st"), ("h\\303\\266\\366\\tst", r"hö\xf6\tst")],
)
def test_a_name_that_is_no_text(octal: str, name: str) -> None:
    assert printed_on(octal, _SAYS) == f"{name!a}\n"
