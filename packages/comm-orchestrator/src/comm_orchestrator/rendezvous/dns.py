"""Host names, looked up within a limit."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["resolve", "with_limit"]


def resolve(host: str, port: int, limit_s: float) -> list[Any]:
    """``getaddrinfo``, which can take as long as it likes, within ``limit_s``."""
    found = with_limit(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), limit_s)
    if isinstance(found, BaseException):
        try:
            raise found
        finally:
            del found
    if found is None:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer from the name service within {limit_s:.3g} s")
    return list(found)


def with_limit(call: Callable[[], Any], limit_s: float) -> Any:
    """Run ``call`` and return its result or raise its error; None where that takes longer."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=run, name="comm-connect", daemon=True)
    thread.start()
    thread.join(limit_s)
    # Taken out: an error in the list would keep itself alive, and with it every socket of its frames.
    return outcome.pop() if outcome else None
