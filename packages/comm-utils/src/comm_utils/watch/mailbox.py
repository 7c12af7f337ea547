"""Messages between ranks of different hosts about what they do: the contract of the store that carries them."""

from __future__ import annotations

from typing import Protocol

__all__ = ["Mailbox"]


class Mailbox(Protocol):
    """A key-value store that all ranks reach, over a connection that no call of the program uses.

    Every method may raise ``RuntimeError`` or ``OSError`` where the store has gone.
    """

    def set(self, key: str, value: bytes) -> None:
        """Store ``value``."""

    def get(self, key: str) -> bytes | None:
        """Return what is stored, at once; None where there is nothing."""

    def add(self, key: str, amount: int) -> int:
        """Add to a counter and return what it is then."""

    def close(self) -> None:
        """End the connection."""
