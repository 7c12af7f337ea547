"""Native kernels that installed packages offer to every layer, whichever backend is active.

They are named by the entry points ``comm_utils.kernels`` and looked up once, when they are first needed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from comm_utils.log import logger
from comm_utils.plugins import entry_points, load
from comm_utils.reduce_op import ReduceOp

if TYPE_CHECKING:
    import torch

__all__ = [
    "ENTRY_POINT_GROUP",
    "CollectingPaths",
    "PathsByKey",
    "PlainBatch",
    "SizesOfDtype",
    "collecting_path",
    "collecting_paths",
    "decode",
    "decode_reduce_encode",
    "encode",
    "plain_batch",
    "plain_tensors",
    "recording_functions",
    "reduce",
    "shared_memory_stats",
    "transfer_profile",
    "tune_transfers",
]

ENTRY_POINT_GROUP = "comm_utils.kernels"


def reduce(output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp) -> bool:
    """Overwrite ``output`` with the reduction of ``inputs``, as a balanced binary tree over them in their order.

    Of four, that is ``(0 + 1) + (2 + 3)``; of n, the left half has the largest power of two that is less than n. 16-bit
    floats are reduced, and averaged, in float32 and rounded once.

    Args:
        output: of the inputs' shape and dtype; may be one of them, and must not overlap them otherwise.

    Returns:
        False, with nothing done, where no installed kernel does this on these tensors.
    """
    kernel = _kernel("reduce")
    return kernel is not None and bool(kernel(output, inputs, op))


def encode(codec: str, source: torch.Tensor, wire: torch.Tensor, block: int, error: torch.Tensor | None) -> bool:
    """Overwrite ``wire`` with ``source`` in a format of ``comm_collectives.compression``.

    Args:
        codec: the name of the format, such as ``"int8"``.
        source: float32, (n,), contiguous; only read.
        wire: uint8, contiguous, aligned to 4 bytes, as long as the format needs.
        block: elements that share a scale: a multiple of 16, at most 4096.
        error: float32, (n,), contiguous: added to ``source`` first, and overwritten with what the encoding loses; or
            None.

    Returns:
        False, with nothing done, where no installed kernel has this format on this device.
    """
    kernel = _kernel("encode")
    return kernel is not None and bool(kernel(codec, source, wire, block, error))


def decode(codec: str, wire: torch.Tensor, target: torch.Tensor, block: int, adds: bool) -> bool:
    """Overwrite ``target``, float32, (n,), with what :func:`encode` wrote, or add it to ``target``.

    Returns:
        False, with nothing done, where no installed kernel has this format on this device.
    """
    kernel = _kernel("decode")
    return kernel is not None and bool(kernel(codec, wire, target, block, adds))


def decode_reduce_encode(
    codec: str,
    wires: Sequence[torch.Tensor],
    total: torch.Tensor,
    divisor: int,
    wire: torch.Tensor,
    block: int,
    error: torch.Tensor | None,
) -> bool:
    """Add what ``wires`` hold to ``total``, in their order, divide it by ``divisor``, and encode it into ``wire``.

    The bits are those of :func:`decode`, a division, :func:`encode` and :func:`decode` one after the other.

    Args:
        wires: each as :func:`encode` wrote it, of as many bytes as ``wire``, with which they share no memory.
        total: float32, (n,), contiguous; overwritten with what is decoded from ``wire``.
        wire, block, error: see :func:`encode`.

    Returns:
        False, with nothing done, where no installed kernel has this format on this device.
    """
    kernel = _kernel("decode_reduce_encode")
    return kernel is not None and bool(kernel(codec, wires, total, divisor, wire, block, error))


class SizesOfDtype(NamedTuple):
    """The sizes of the tensors of one dtype in a :class:`PlainBatch`, which are one at least.

    Attributes:
        nbytes: of all their elements.
        packed: the elements of each, as 8 bytes, least significant first.
    """

    nbytes: int
    packed: bytes

    @property
    def number(self) -> int:
        """Return the number of tensors."""
        return len(self.packed) // 8


class PlainBatch:
    """Many plain tensors (:func:`plain_tensors`), of which no two share memory.

    Attributes:
        is_usual: none requires a gradient or was made in inference mode.
    """

    __slots__ = ("is_usual",)

    is_usual: bool

    @property
    def sizes(self) -> dict[torch.dtype, SizesOfDtype]:
        """Return the sizes by dtype, in the order in which the dtypes come."""
        raise NotImplementedError

    def tensors(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Return a new list of the tensors of one dtype, in their order."""
        raise NotImplementedError

    def pack(self, buckets: Sequence[torch.Tensor]) -> bool:
        """Overwrite each bucket with the tensors of its dtype, one after the other.

        Args:
            buckets: plain, each of another dtype, of as many bytes as ``sizes`` says, and of other memory.

        Returns:
            False, with nothing done, where one is not.
        """
        raise NotImplementedError

    def unpack(self, buckets: Sequence[torch.Tensor]) -> bool:
        """Overwrite the tensors with what is in their bucket, and count a new version of each for autograd.

        Args:
            buckets: as :meth:`pack` takes them.

        Returns:
            False, with nothing done, where buckets do not fit or a tensor has other memory by now.
        """
        raise NotImplementedError


def plain_batch(tensors: list[torch.Tensor]) -> PlainBatch | None:
    """Return all of ``tensors`` as one.

    Returns:
        None where no installed package does this, a tensor is not plain, or two share memory.
    """
    kernel = _kernel("plain_batch")
    return None if kernel is None else kernel(tensors)


class PathsByKey(Protocol):
    """Stand for a dictionary of :class:`comm_utils.fast_path.FastPathCache`, with what a collective uses of it."""

    def get(self, key: Any, /) -> Any:
        """Return a fast path, or None."""

    def __setitem__(self, key: Any, fast_path: Any, /) -> None: ...


class CollectingPaths(PathsByKey, Protocol):
    """A replacement for such a dictionary, made by :func:`collecting_paths`."""

    def forget(self) -> None:
        """Remember no answer: a thread begins or ends to collect its calls."""


def collecting_paths(
    fallback: PathsByKey, threads: dict[int, dict[Any, Any]], make: Callable[[Any], Any]
) -> CollectingPaths | None:
    """Return a replacement for a dictionary of fast paths, which lets some threads collect their calls.

    Args:
        fallback: where other threads look, and where items are set.
        threads: of each thread that collects, by its identifier, its fast paths by key.
        make: returns a fast path of the calling thread that is not there yet, or None.

    Returns:
        None where no installed package does this.
    """
    kernel = _kernel("collecting_paths")
    return None if kernel is None else kernel(fallback, threads, make)


def collecting_path(key: object, runs: list[Any], return_value: object) -> Callable[..., Any] | None:
    """Return a fast path that collects its argument, or the tuple of several, instead of executing the call.

    Args:
        key: of its calls.
        runs: pairs of a key and a list of what was collected; calls of another key than the last begin another pair.
        return_value: what it returns.

    Returns:
        None where no installed package does this.
    """
    kernel = _kernel("collecting_path")
    return None if kernel is None else kernel(key, runs, return_value)


def plain_tensors(
    device_type: str,
    dtypes: Iterable[torch.dtype],
    inference: bool,
    grad: bool,
    otherwise: Callable[[Sequence[object]], bool],
) -> Callable[[Sequence[object]], bool] | None:
    """Return a native predicate that says what ``otherwise`` does; None where no installed package has one.

    See :func:`comm_utils.torch_support.plain_tensors.plain_tensors`.
    """
    kernel = _kernel("plain_tensors")
    return None if kernel is None else kernel(device_type, dtypes, inference, grad, otherwise)


def recording_functions(
    recorder: Any, series: object, kind: int, signature: int, counts: bool, tag_word: int
) -> tuple[Callable[..., int], Callable[[int], None], Callable[[int], None], Callable[..., None]] | None:
    """Return the native functions that record calls of one kind; None where no installed package has them.

    Args:
        recorder: a ``FlightRecorder``, which opens no other ring as long as the kind is used.
        series, kind, counts, tag_word: see ``comm_utils.flight_recorder.kinds.make_kind``.
        signature: a hash, less than 2 ** 56, of what the ranks have to agree about.

    Returns:
        the functions begin, end, fail and wait of ``comm_utils.flight_recorder.kinds.Kind``.
    """
    kernel = _kernel("recording_functions")
    return None if kernel is None else kernel(recorder, series, kind, signature, counts, tag_word)


def shared_memory_stats() -> dict[str, int]:
    """Return what this process holds in shared memory for tensors; empty where no installed package has such memory."""
    kernel = _kernel("shared_memory_stats")
    return {} if kernel is None else kernel()


def transfer_profile() -> dict[str, Any] | None:
    """Return how fast this host moves data in shared memory, as far as it was measured.

    Returns:
        None where no installed package measures it. Else ``file``: its place, None where it is turned off;
        ``machine``: what it holds for; ``ranks``: by number of ranks, when it was ``measured``, ``by`` what, and
        ``rows`` with ``operation``, ``least_bytes`` (of a size class, which ends at twice as much), ``narrow`` (16-bit
        floats), ``eager`` (in one step), ``method`` and ``ns`` (the median of some calls); ``world``: by what the
        profile was measured from which the world of this process started, empty for none, None where the world's ranks
        do not share memory; ``unavailable_reason``: why what :func:`tune_transfers` measures cannot be kept, "" where
        it can.
    """
    kernel = _kernel("transfer_profile")
    return None if kernel is None else kernel()


def tune_transfers(seen: Callable[[str, int], None] | None = None) -> bool:
    """Measure thoroughly how this host moves data, and keep it; all ranks of the world call this alike.

    Args:
        seen: called with an operation and a size in bytes before each is measured.

    Returns:
        False, with nothing done, where the world's ranks do not share memory.
    """
    kernel = _kernel("tune_transfers")
    return kernel is not None and bool(kernel(seen))


@functools.cache
def _kernel(name: str) -> Callable[..., Any] | None:
    for entry in entry_points(ENTRY_POINT_GROUP):
        if entry.name == name:
            try:
                found: Callable[..., Any] = load(entry)
            except Exception as error:
                logger.warning("the kernel %s of %s cannot be used: %s", name, entry.value, error)
                continue
            return found
    return None
