import re

import pytest

from comm_utils import CommTimeoutError, PeerLostError
from comm_utils.torch_support.failures import classify, format_failure, summarize


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Timed out waiting 5000ms for recv operation to complete", CommTimeoutError),
        ("Operation timed out!", CommTimeoutError),
        ("wait timeout after 100ms, keys: /default_pg/0//cpu//0/1", CommTimeoutError),
        ("[external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41021", PeerLostError),
        ("Read error [127.0.0.1]:9: Connection reset by peer", PeerLostError),
        ("Connection closed by peer [127.0.0.1]:41021 while an operation with a timeout of 5000ms ran", PeerLostError),
        ("NCCL error: remote process exited or there was a network error", PeerLostError),
        ("Invalid scalar type", None),
        ("size mismatch", None),
    ],
)
def test_messages_of_c10d(text: str, expected: type | None) -> None:
    assert classify(RuntimeError(text)) is expected


GLOO = "[/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            GLOO + "unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete",
            "Timed out waiting 3000ms for recv operation to complete",
        ),
        (
            GLOO + "pair.cc:553] Connection closed by peer [127.0.0.1]:41193. This is typically caused by a remote "
            "worker crashing. Check the logs of the remote worker before reporting an error. GLHF! \U0001f3d6\ufe0f",
            "Connection closed by peer [127.0.0.1]:41193",
        ),
        (
            "NCCL error in: /torch/csrc/distributed/c10d/NCCLUtils.cpp:12, remote process exited or there was a "
            "network error, NCCL version 2.27\nncclRemoteError: A call failed possibly due to a network error.",
            "NCCL error remote process exited or there was a network error, NCCL version 2.27",
        ),
        (
            "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
            "allocate 134217728 bytes. Error code 12 (Cannot allocate memory)",
            "DefaultCPUAllocator: can't allocate memory: you tried to allocate 134217728 bytes",
        ),
        (
            "[enforce fail at /torch/third_party/gloo/gloo/transport/tcp/socket.cc:142] rv != -1. -1 vs -1. connect: "
            "Invalid argument",
            "connect: Invalid argument",
        ),
        ("\n  \nOperation timed out!\nframe #0: c10::Error (0x7f in libc10.so)", "Operation timed out!"),
        ("", "RuntimeError"),
        ("timeout " * 100, ("timeout " * 100)[:200] + "..."),
    ],
)
def test_the_librarys_text_summarize(text: str, expected: str) -> None:
    assert summarize(RuntimeError(text)) == expected


def test_a_timeout_says_after_how_long_and_what_to_do() -> None:
    group = "the group of ranks [0, 1]"
    waited = format_failure(
        CommTimeoutError, "gather", group, 1, RuntimeError("Timed out waiting 2500ms for recv"), 30.0
    )
    assert waited.startswith(f"gather on {group} timed out after 2.5 s, as seen by rank 1: a rank of the group did not")
    assert "a monitored_barrier() before the call names who, and timeout= of" in waited
    assert re.search(r"timeout= of (init_distributed|comm_utils\.Setup)\(\) and new_group\(\) sets the limit$", waited)
    assert " after 30 s," in format_failure(
        CommTimeoutError, "gather", group, 1, RuntimeError("watchdog timeout"), 30.0
    )
    of_call = format_failure(CommTimeoutError, "gather", group, 1, RuntimeError("timed out"), 0.5, of_call=True)
    assert "timeout= of this call sets the limit" in of_call
    assert " timed out, as" in format_failure(
        CommTimeoutError, "gather", group, 1, RuntimeError("watchdog timeout"), None
    )


def test_a_lost_peer_is_to_be_looked_for_elsewhere() -> None:
    lost = format_failure(
        PeerLostError, "gather", "the group of ranks [0, 1]", 1, RuntimeError("Connection closed"), 30.0
    )
    assert lost == (
        "gather on the group of ranks [0, 1] lost a peer, as seen by rank 1: another rank of the group ended, gave up "
        "or lost its connection; its own output says why"
    )
