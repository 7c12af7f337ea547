import pytest

from comm_backend_torch.failures import classify
from comm_utils import CommTimeoutError, PeerLostError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Timed out waiting 5000ms for recv operation to complete", CommTimeoutError),
        ("Operation timed out!", CommTimeoutError),
        ("wait timeout after 100ms, keys: /default_pg/0//cpu//0/1", CommTimeoutError),
        ("[external/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:41021", PeerLostError),
        ("Read error [127.0.0.1]:9: Connection reset by peer", PeerLostError),
        ("NCCL error: remote process exited or there was a network error", PeerLostError),
        ("Invalid scalar type", None),
        ("size mismatch", None),
    ],
)
def test_messages_of_c10d(text: str, expected: type | None) -> None:
    assert classify(RuntimeError(text)) is expected
