"""The compiled library: the one module that calls into it."""

from __future__ import annotations

import atexit
import ctypes
import os
import platform
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from comm_backend_ccl.interface import missing_address
from comm_backend_ccl.libraries import LIBFABRIC, ONECCL, folder
from comm_backend_ccl.shm_cleanup import sweep
from comm_backend_ccl.tables import Operation
from comm_utils.errors import BackendUnavailableError
from comm_utils.process_locks import ProcessLock
from comm_utils.threads import is_still_connecting
from comm_utils.torch_support.dropped import Dropped

__all__ = [
    "START_AGAIN",
    "Group",
    "Handle",
    "create",
    "destroy",
    "earlier_failure",
    "ended_ns",
    "facts",
    "initialize",
    "note_failure",
    "plan",
    "release",
    "start",
    "unavailable_reason",
    "wait",
]

_CAPACITY = 1024
_GET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)
_SET = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int)

#: The only remedy after a failure that was passed to :func:`note_failure`.
START_AGAIN = "end the processes of all ranks and start them again"


class _Group(ctypes.Structure):
    """Stand for the group behind a :class:`Group`."""


# To a type checker, this function of ctypes has no type that can be written.
if TYPE_CHECKING:

    class Group:
        """A group of ranks; :func:`destroy` ends it."""

else:
    Group = ctypes.POINTER(_Group)


class Handle:
    """An operation under way; its owner gives it to :func:`release`.

    It is made before the operation begins and keeps the tensors in whose memory that goes on: an exception that a
    signal handler raises, such as ``KeyboardInterrupt``, may end any function that was about to return the handle.

    Attributes:
        address: of the library's own; of no operation before one has begun, and after the release.
        kept: the tensors.
    """

    __slots__ = "address", "kept"

    def __init__(self, kept: tuple[Any, ...]) -> None:
        self.address = ctypes.c_void_p()
        self.kept = kept

    def __del__(self) -> None:
        if not self.address:
            return
        with suppress(Exception):  # in a forked child, or as the interpreter ends
            add = _dropped.add  # first, as it is not there any more in the end
            # Another handle: in one garbage, what owns this one may still ask about it.
            kept = Handle(self.kept)
            kept.address, self.address = self.address, ctypes.c_void_p()
            add(kept)


def _is_released(handle: Handle) -> bool:
    """Release the operation if it has come to a good end, and return whether it has."""
    if handle.address and _Loaded.library.comm_oneccl_wait(handle.address, 0.0, None, 0) <= 0:
        return False
    release(handle)
    return True


#: Operations whose handle was dropped before its release.
_dropped = Dropped(_is_released)


class _Call(ctypes.Structure):
    _fields_ = (
        ("operation", ctypes.c_int),
        ("input", ctypes.c_void_p),
        ("output", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
        ("input_counts", ctypes.POINTER(ctypes.c_size_t)),
        ("output_counts", ctypes.POINTER(ctypes.c_size_t)),
        ("dtype", ctypes.c_int),
        ("op", ctypes.c_int),
        ("peer", ctypes.c_int),
    )


class _Plan(ctypes.Structure):
    _fields_ = (
        ("group", ctypes.POINTER(_Group)),
        ("operation", ctypes.c_int),
        ("dtype", ctypes.c_int),
        ("op", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("seconds", ctypes.c_double),
    )


class _Loaded:
    """The library, once it is loaded."""

    library: Any = None
    turn = ProcessLock(threading.Lock)
    #: oneCCL's settings are read once in a process.
    initialized = False
    #: For TCP; "" leaves it to libfabric.
    interface = ""
    #: What an operation failed with that its ranks did not agree on; oneCCL keeps its requests.
    failure: str | None = None


def note_failure(what: str) -> None:
    """Refuse groups from now on: requests that oneCCL keeps of a failed operation break those of later groups."""
    _Loaded.failure = _Loaded.failure or what


def earlier_failure() -> str | None:
    """Return why no new group can use oneCCL in this process; None where it can."""
    if _Loaded.failure is None and is_still_connecting("oneCCL"):
        return "oneCCL still waits for the connections of a group that was given up"
    return _Loaded.failure and f"oneCCL failed earlier in this process ({_Loaded.failure})"


def unavailable_reason() -> tuple[str, str] | None:
    """Return why oneCCL cannot run here, and the remedy; None where it can."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return f"oneCCL runs on Linux on x86-64 only, this is {sys.platform} on {platform.machine()}", _GLOO
    if (failure := earlier_failure()) is not None:
        return failure, f"{START_AGAIN}, or {_GLOO}"
    where = folder()
    if where is None:
        return "this installation of comm-backend-ccl was built without oneCCL", (
            "reinstall it without COMM_CCL_WITHOUT_NATIVE in the environment"
        )
    try:
        _library()
        # oneCCL itself would look for it only when the first group is made.
        ctypes.CDLL(str(_libfabric(where)))
    except (AttributeError, OSError) as error:
        named = "CCL_OFI_LIBRARY_PATH" in os.environ
        remedy = "unset CCL_OFI_LIBRARY_PATH" if named else "reinstall comm-backend-ccl"
        return f"oneCCL cannot be loaded ({error})", f"{remedy}, or {_GLOO}"
    return None


_GLOO = "use dist_backend='gloo'"


def _libfabric(where: Path) -> Path:
    return Path(os.environ.get("CCL_OFI_LIBRARY_PATH") or where / LIBFABRIC)


def _library() -> Any:
    with _Loaded.turn.lock:
        if _Loaded.library is None:
            where = folder()
            if where is None:
                raise BackendUnavailableError("this installation of comm-backend-ccl was built without oneCCL")
            _Loaded.library = _typed(ctypes.CDLL(str(where / ONECCL)))
        return _Loaded.library


def _typed(library: Any) -> Any:
    text, made = (ctypes.c_char_p, ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "initialize": (
            ctypes.c_int,
            (*(ctypes.c_char_p,) * 3, *(ctypes.c_int,) * 3, *text),
        ),
        "version": (ctypes.c_int, text),
        "create": (Group, (ctypes.c_int, ctypes.c_int, _GET, _SET, ctypes.c_void_p, *text)),
        "destroy": (None, (Group,)),
        "start": (ctypes.c_int, (Group, ctypes.POINTER(_Call), ctypes.c_int, made, *text)),
        "run": (ctypes.c_int, (ctypes.POINTER(_Plan), ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, made)),
        "wait": (ctypes.c_int, (ctypes.c_void_p, ctypes.c_double, *text)),
        "ended": (ctypes.c_int64, (ctypes.c_void_p,)),
        "release": (None, (ctypes.c_void_p,)),
        "stop": (None, ()),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, f"comm_oneccl_{name}")
        function.restype, function.argtypes = result, arguments
    return library


class _Message(threading.local):
    """A buffer into which the library writes its error message."""

    def __init__(self) -> None:
        self.buffer = ctypes.create_string_buffer(_CAPACITY)

    def text(self) -> str:
        return self.buffer.value.decode(errors="replace")


_message = _Message()


def facts() -> dict[str, str]:
    """Return the versions of what is used, and where each library came from."""
    where = folder()
    assert where is not None
    buffer = ctypes.create_string_buffer(_CAPACITY)
    _library().comm_oneccl_version(buffer, _CAPACITY)
    libfabric = _libfabric(where)
    version = ctypes.CDLL(str(libfabric)).fi_version()
    return {
        "oneCCL": buffer.value.decode().split(" (")[0],
        "oneCCL from": str(where / ONECCL),
        "libfabric": f"{version >> 16}.{version & 0xFFFF}",
        "libfabric from": str(libfabric),
        "fabric provider": os.environ.get("FI_PROVIDER", "tcp"),
        "shared memory of oneCCL": "on" if os.environ.get("CCL_ATL_SHM") == "1" else "off",
    }


def initialize(local_rank: int, local_size: int, interface: str, oversubscribed: bool) -> None:
    """Prepare oneCCL for groups whose ranks on this host are so many.

    Args:
        interface: for TCP; "" leaves it to libfabric.
        oversubscribed: ranks share hardware threads, so that one that waits must not keep its own.

    Raises:
        BackendUnavailableError: oneCCL refused, and why.
    """
    where = folder()
    library = _library()
    assert where is not None
    libfabric = str(_libfabric(where)).encode()
    text = _message.buffer
    names = libfabric, b"tcp", interface.encode()
    if library.comm_oneccl_initialize(*names, local_rank, local_size, int(oversubscribed), text, _CAPACITY):
        raise BackendUnavailableError(f"oneCCL could not be initialised: {_message.text()}")
    if not _Loaded.initialized:
        _Loaded.initialized = True
        _Loaded.interface = interface
        atexit.register(_stop)


def _stop() -> None:
    if not is_still_connecting("oneCCL"):  # a thread that was given up is in the library
        _Loaded.library.comm_oneccl_stop()
    if os.environ.get("CCL_ATL_SHM") == "1":
        sweep(ending=True)


def create(size: int, rank: int, get: Callable[[str], bytes | None], put: Callable[[str, bytes], None]) -> Group:
    """Make a group together with its other ranks, which do the same; returns when all have come.

    Args:
        get: the value of a key, None where it has none yet; an exception ends the wait and is raised from here.
        put: sets a key.
    """
    library = _library()
    failure: list[BaseException] = []

    def read(_: object, key: bytes, value: int, capacity: int) -> int:
        try:
            found = get(key.decode())
            if found is None:
                return 0
            if len(found) > capacity:
                raise BackendUnavailableError(f"{key.decode()} of the store has {len(found)} bytes, not {capacity}")
            ctypes.memmove(value, found, len(found))
            return len(found)
        except BaseException as error:
            failure.append(error)
            return -1

    def write(_: object, key: bytes, value: int, size: int) -> int:
        try:
            put(key.decode(), ctypes.string_at(value, size))
            return 0
        except BaseException as error:
            failure.append(error)
            return -1

    buffer = ctypes.create_string_buffer(_CAPACITY)
    made: Group = library.comm_oneccl_create(size, rank, _GET(read), _SET(write), None, buffer, _CAPACITY)
    if not made:
        if failure:
            raise failure[0]
        provider = os.environ.get("FI_PROVIDER")
        remedies = [missing_address(os.environ.get("FI_TCP_IFACE") or _Loaded.interface)]
        remedies += [f"FI_PROVIDER={provider} chooses how libfabric connects: unset it"] if provider else []
        advice = "".join(f"; {one}" for one in remedies if one)
        said = buffer.value.decode(errors="replace")
        raise BackendUnavailableError(f"oneCCL could not make a group: {said}{advice}")
    return made


def destroy(group: Group) -> None:
    """Free what :func:`create` returned."""
    _library().comm_oneccl_destroy(group)


def start(
    group: Group,
    operation: Operation,
    source: torch.Tensor,
    target: torch.Tensor,
    count: int,
    dtype: int,
    op: int = 0,
    peer: int = 0,
    watched: bool = False,
    source_counts: Sequence[int] = (),
    target_counts: Sequence[int] = (),
) -> Handle:
    """Start an operation on the memory of tensors, which the handle keeps until it is complete.

    Args:
        count: elements; what it counts is oneCCL's for each operation.
        watched: it has to come to an end even if nobody waits.

    Raises:
        RuntimeError: oneCCL refused.
    """
    if _dropped:
        _dropped.look()
    sent = (ctypes.c_size_t * len(source_counts))(*source_counts) if source_counts else None
    received = (ctypes.c_size_t * len(target_counts))(*target_counts) if target_counts else None
    text = _message.buffer
    call = _Call(operation, source.data_ptr(), target.data_ptr(), count, sent, received, dtype, op, peer)
    handle = Handle((source, target))
    made = ctypes.byref(handle.address)
    if _Loaded.library.comm_oneccl_start(group, ctypes.byref(call), watched, made, text, _CAPACITY):
        raise RuntimeError(_message.text())
    return handle


def plan(
    group: Group, operation: Operation, dtype: int, op: int, peer: int, seconds: float
) -> Callable[[tuple[Any, ...], int, int, int], Handle | None]:
    """Return a function that starts ``operation`` and waits for it up to ``seconds``.

    It takes the tensors that are used, source, target and count. It returns None if the operation is complete, else a
    handle as :func:`start` does, of one under way or failed.
    """
    settled = ctypes.byref(_Plan(group, operation, dtype, op, peer, seconds))
    call = _Loaded.library.comm_oneccl_run

    def run(kept: tuple[Any, ...], source: int, target: int, count: int) -> Handle | None:
        if _dropped:
            _dropped.look()
        handle = Handle(kept)
        return None if call(settled, source, target, count, ctypes.byref(handle.address)) else handle

    return run


def wait(handle: Handle, seconds: float) -> bool:
    """Return whether the operation was complete within ``seconds``; 0 asks and does not wait.

    Of a handle that was released, True.

    Raises:
        RuntimeError: it failed.
    """
    if not handle.address:
        return True
    state = _Loaded.library.comm_oneccl_wait(handle.address, seconds, _message.buffer, _CAPACITY)
    if state < 0:
        raise RuntimeError(_message.text())
    if state:
        handle.kept = ()
    return bool(state)


def ended_ns(handle: Handle) -> int | None:
    """Return when the operation was complete, by ``time.perf_counter_ns``; None where it is not, or was released."""
    if not handle.address:
        return None
    return _Loaded.library.comm_oneccl_ended(handle.address) or None


def release(handle: Handle) -> None:
    """Give a handle back, whose operation is over."""
    address, handle.address = handle.address, ctypes.c_void_p()
    handle.kept = ()
    if address:
        _Loaded.library.comm_oneccl_release(address)
