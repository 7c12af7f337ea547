"""The options of ``commctl trace replay``, validated as far as possible before any rank starts."""

from __future__ import annotations

import json
import math
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from comm_orchestrator import facade, selector
from comm_orchestrator.tools.local_ranks import memory_for_data_bytes
from comm_orchestrator.tools.trace.files import check_output
from comm_orchestrator.tools.trace.replay_plan import Plan
from comm_utils.errors import ArgumentError, BackendUnavailableError
from comm_utils.observability.traces import RankTrace
from comm_utils.sizes import format_size

__all__ = ["Options", "check_files", "check_here", "check_recorded", "peak_bytes"]

_LEAST_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Options:
    """Everything that ranks have to know.

    Attributes:
        backend: empty for the recorded one.
        output: the folder for the trace of the replay; empty for none.
        timeout_s: of each operation; 0 for three times the longest that was recorded, and at least a minute.
        planned: a folder with the traces as they are to be replayed; empty where a rank has to find that out itself.
        begin_ns: when the first rank began; with ``planned``.
    """

    folder: str
    backend: str = ""
    output: str = ""
    keep_gaps: bool = False
    json: str = ""
    timeout_s: float = 0.0
    planned: str = ""
    begin_ns: int = 0

    def __post_init__(self) -> None:
        if not (math.isfinite(self.timeout_s) and (self.timeout_s == 0 or 1 <= self.timeout_s <= 86400)):
            raise ArgumentError(f"--timeout: got {self.timeout_s:g}; expected 1 to 86400 seconds, or 0 to derive it")

    def dumps(self) -> str:
        """Return the options as text, for :meth:`loads`."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Options:
        """Read the text that :meth:`dumps` wrote."""
        return cls(**json.loads(text))

    def limit_s(self, longest_s: float) -> float:
        """Return how long an operation may take, where the longest recorded one took ``longest_s``."""
        return self.timeout_s or max(_LEAST_TIMEOUT_S, 3 * longest_s)


def check_files(options: Options) -> None:
    """Refuse files that cannot be written.

    Raises:
        ArgumentError: names the option.
    """
    if options.json:
        path = Path(options.json)
        check_output("--json", path, Path(options.folder))
        if path.exists() and not path.is_file():
            raise ArgumentError(f"--json: {path} is no file")
        parent = Path(os.path.realpath(path)).parent
        if not _can_be_written_in(parent):
            raise ArgumentError(f"--json: {path}: cannot be written: {parent} is no folder that can be written to")
    if not options.output:
        return
    output = Path(options.output)
    if output.exists() and not output.is_dir():
        raise ArgumentError(f"--output: {output}: got a file; expected a folder for the trace of the replay")
    if output.exists() and output.samefile(options.folder):
        raise ArgumentError(f"--output: {output} is the trace that is replayed; expected another folder")
    existing = next(one for one in (output, *output.absolute().parents) if one.exists())
    if not _can_be_written_in(existing):
        raise ArgumentError(f"--output: {output} cannot be written: {existing} cannot be written to")


def _can_be_written_in(folder: Path) -> bool:
    return folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)


def check_here(options: Options, plan: Plan, recorded: bool) -> None:
    """Refuse what ranks of this host alone cannot do.

    Args:
        recorded: the backend is that of the trace, as nobody has named one.

    Raises:
        BackendUnavailableError: the backend is not there.
        ArgumentError: too many ranks for the devices, or for the memory.
    """
    W = plan.traces[0].world_size
    if options.backend:
        names = {part.rpartition(":")[2].strip().lower() for part in options.backend.split(",")}
        if recorded:
            check_recorded(options.backend)
        else:
            _check_named(names)
        if "nccl" in names:
            _check_devices(W)
    needed, free = sum(map(peak_bytes, plan.traces)), memory_for_data_bytes(W)
    if free is not None and needed > 0.9 * free:
        raise ArgumentError(
            f"the replay of {W} ranks needs {format_size(needed)} and {format_size(free)} of memory are free here; "
            "start it by a launcher, on the hosts of the job"
        )


def check_recorded(backend: str) -> None:
    """Refuse the library of the recording where it is missing here.

    Raises:
        BackendUnavailableError: it is missing.
    """
    try:
        selector.choose(backend)
    except BackendUnavailableError as error:
        remedy = "or replay it on another library, such as --backend gloo"
        raise BackendUnavailableError(f"the trace was recorded on {backend!r:.60}: {error}; {remedy}") from None


def _check_named(names: set[str]) -> None:
    known = facade.available_backends()
    for name in sorted(names):
        if name not in known:
            raise ArgumentError(f"--backend: got {name!r}; expected one of {', '.join(sorted(known))}")
        if not known[name].usable:
            why, remedy = known[name].reason, known[name].remedy
            raise BackendUnavailableError(f"--backend: {name} cannot be used here: {why}; {remedy}".rstrip("; "))


def _check_devices(W: int) -> None:
    import torch

    found = torch.cuda.device_count()
    if found < W:
        raise ArgumentError(
            f"nccl needs a GPU for each of the {W} ranks and {found} are here; start it by a launcher, on "
            "the hosts of the job, or use --backend gloo"
        )


def peak_bytes(trace: RankTrace) -> int:
    """At least what the replay of one rank needs for its tensors: each in a buffer of up to twice its size."""
    synchronous = 0
    changes: list[tuple[int, int]] = []
    for event in trace.events:
        operation = event.operation
        size = 2 * operation.size_bytes
        if not operation.asynchronous:
            synchronous = max(synchronous, size)
            continue
        until = event.waits[0].end_ns if event.waits else event.end_ns
        changes += [(event.begin_ns, size), (max(until, event.begin_ns), -size)]
    changes.sort()
    most = now = 0
    for _, size in changes:
        now += size
        most = max(most, now)
    return synchronous + most
