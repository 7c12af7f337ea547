"""Host names, looked up within a limit."""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401, which socket imports for the first name: Python remembers where that failed
import socket
from contextlib import suppress
from typing import Any

from comm_utils.threads import with_limit

__all__ = ["ask_briefly", "resolve"]

# The thread's struct __res_state of glibc begins with the seconds for an answer and the number of attempts. Source:
# resolv/bits/types/res_state.h
_Limits = ctypes.c_int * 2


def ask_briefly() -> None:
    """Have this thread wait for each name server for a second, once; nothing happens without glibc.

    torch's store asks for the name of each address that it connects to, for its log alone. By default, glibc waits for
    each name server that does not answer for 5 s, twice.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        initialize, state = library["__res_init"], library["__res_state"]
        state.restype = ctypes.POINTER(_Limits)
        if initialize() == 0:
            state().contents[:] = 1, 1


def resolve(host: str, port: int, limit_s: float) -> list[Any]:
    """``getaddrinfo``, which can take as long as it likes, within ``limit_s``.

    Raises:
        socket.gaierror: the name does not resolve, or is none.
    """
    found = with_limit(lambda: socket.getaddrinfo(host, port, type=socket.SOCK_STREAM), limit_s, needs_thread=False)
    if isinstance(found, UnicodeError):
        raise socket.gaierror(socket.EAI_NONAME, f"it is no host name: {found}")
    if isinstance(found, BaseException):
        try:
            raise found
        finally:
            del found
    if found is None:
        raise socket.gaierror(socket.EAI_AGAIN, f"no answer from the name service within {limit_s:.3g} s")
    return list(found)
