"""The watch's connection to the store of a world."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from comm_utils.torch_support.store_mailbox import connect_mailbox

_SERVER = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def test_messages_arrive_and_a_server_that_has_gone_is_reported_at_once() -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", _SERVER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with server:
        assert server.stdout is not None
        store = TCPStore("127.0.0.1", int(server.stdout.readline()), None, False)
        mailbox = connect_mailbox(PrefixStore("world", store), "job")
        assert mailbox is not None
        mailbox.set("key", b"value\0")
        assert mailbox.get("key") == b"value\0"
        assert mailbox.get("other") is None
        assert mailbox.add("counter", 2) == 2
        mailbox.close()
        server.kill()
        assert server.stderr is not None
        assert server.stderr.read() == ""
    begin = time.monotonic()
    with pytest.raises(ConnectionRefusedError):
        connect_mailbox(store, "job")
    assert time.monotonic() - begin < 1


def test_a_store_without_a_server_has_no_mailbox() -> None:
    assert connect_mailbox(HashStore(), "job") is None
