"""The store of a world as the mailbox of its watch."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch.distributed import Store, TCPStore

from comm_utils import standard_descriptors
from comm_utils.torch_support.bounded_store import tcp_store_below

__all__ = ["StoreMailbox", "connect_mailbox"]

_LIMIT = timedelta(seconds=2)
# In which a process that ends closes a new connection.
_MOMENT_S = 0.05


class StoreMailbox:
    """See ``comm_utils.watch.mailbox.Mailbox``."""

    def __init__(self, store: Store, prefix: str) -> None:
        self._store, self._prefix = store, prefix

    def set(self, key: str, value: bytes) -> None:
        self._store.set(self._prefix + key, value)  # type: ignore[arg-type]  # torch's annotation says str alone

    def get(self, key: str) -> bytes | None:
        key = self._prefix + key
        if not self._store.check([key]):
            return None
        found: bytes = self._store.get(key)
        return found

    def add(self, key: str, amount: int) -> int:
        return int(self._store.add(self._prefix + key, amount))

    def close(self) -> None:
        """Drop the connection."""
        del self._store


def _check_server(host: str, port: int) -> None:
    with socket.create_connection((host, port), _LIMIT.total_seconds()) as connection:
        connection.settimeout(_MOMENT_S)
        try:
            # It says nothing first: what arrives is the end of a process that has stopped answering.
            if not connection.recv(1):
                raise ConnectionResetError(f"{host}:{port} closed the connection")
        except TimeoutError:
            pass


def connect_mailbox(store: Store, prefix: str) -> StoreMailbox | None:
    """Connect to the server of ``store`` once more, as a call may wait in ``store`` itself; None if it is no TCPStore.

    Raises:
        OSError, RuntimeError: the server cannot be reached.
    """
    below = tcp_store_below(store)
    if below is None:
        return None
    standard_descriptors.occupy()
    # TCPStore waits for a server that has gone, prints what C++ thinks of it, and aborts the process if Python ends
    # meanwhile.
    _check_server(below.host, below.port)
    client = TCPStore(below.host, below.port, None, False, _LIMIT, wait_for_workers=False)
    client.set_timeout(_LIMIT)
    return StoreMailbox(client, f"{prefix}/")
