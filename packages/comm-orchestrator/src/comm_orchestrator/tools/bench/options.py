"""The options of ``commctl bench``, validated as far as possible before any rank starts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from comm_orchestrator.tools.bench import scan
from comm_orchestrator.tools.bench.operations import (
    DTYPE_ALIASES,
    ITEM_BYTES,
    REDUCTIONS,
    aliases,
    averages,
    benchmark,
    benchmarks,
    reduces,
)
from comm_utils.errors import ArgumentError
from comm_utils.operations import patterns

__all__ = [
    "AVERAGES",
    "PEERS",
    "Options",
    "check_reduces",
    "chosen",
    "dtypes",
    "operations",
    "peers",
    "reductions",
    "root",
    "words",
]

PEERS = ("torch", "mpi4py", "deepspeed")
AVERAGES = ("rank 0", "average", "minimum", "maximum")
_LEAST = {
    **{"iters": 1, "warmup_iters": 0, "check": 0, "rounds": 1, "ranks": 0},
    **{"group_size": 0, "stepfactor": 2, "stepbytes": 0, "root": -1},
}


@dataclass(frozen=True)
class Options:
    """Everything that ranks have to know.

    Attributes:
        stepbytes: 0 where ``stepfactor`` is used.
        dtypes, ops: names of torch; all of them where ``all_dtypes`` or ``all_ops``, and what cannot be is left out.
        root: a rank of the group; -1 for each in turn.
        average: 0 rank 0, 1 average, 2 minimum, 3 maximum over the ranks.
        backends: empty for the world's own choice.
        compressions: codecs of our collectives, ``none`` among them; empty where nothing was said of them.
        ranks, group_size: 0 where nobody said.
        tolerance: a share of the old time.
        command: what to show as the command line.
    """

    operations: tuple[str, ...] = (patterns.ALL_REDUCE.name,)
    minbytes: int = 8
    maxbytes: int = 64 << 20
    stepfactor: int = 2
    stepbytes: int = 0
    iters: int = 20
    warmup_iters: int = 5
    check: int = 1
    dtypes: tuple[str, ...] = ("float32",)
    all_dtypes: bool = False
    ops: tuple[str, ...] = ("sum",)
    all_ops: bool = False
    root: int = 0
    average: int = 1
    per_iteration: bool = False
    timeout_s: float = 0.0
    ranks: int = 0
    backends: tuple[str, ...] = ()
    group_size: int = 0
    peers: tuple[str, ...] = ()
    compressions: tuple[str, ...] = ()
    rounds: int = 5
    json: str = ""
    csv: str = ""
    plot: str = ""
    compare: str = ""
    tolerance: float = 0.1
    command: str = "commctl bench"

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            if (value := getattr(self, name)) < least:
                raise ArgumentError(f"--{name.replace('group_s', 'group-s')}: got {value}; expected at least {least}")
        if self.average not in range(len(AVERAGES)):
            known = ", ".join(f"{number} ({name})" for number, name in enumerate(AVERAGES))
            raise ArgumentError(f"--average: got {self.average}; expected one of {known}")
        if self.minbytes > self.maxbytes:
            raise ArgumentError(
                f"--minbytes: got {self.minbytes}, above --maxbytes {self.maxbytes}; expected a size up to that"
            )
        if self.minbytes < 1:
            raise ArgumentError(f"--minbytes: got {self.minbytes}; expected at least 1 byte")
        scan.series(self.minbytes, self.maxbytes, self.stepfactor, self.stepbytes)
        self._check_combinations()

    def _check_combinations(self) -> None:
        if self.all_dtypes or self.all_ops or not any(benchmark(name).reduces for name in self.operations):
            return
        for dtype in self.dtypes:
            for op in self.ops:
                if not self.possible(dtype, op):
                    raise ArgumentError(
                        f"--op: got {op} of {dtype}, which {_lacks(dtype)}; leave one of them out, or give all of "
                        "either, which measures what exists"
                    )

    @staticmethod
    def possible(dtype: str, op: str) -> bool:
        """Return whether ``op`` exists for ``dtype``."""
        return averages(dtype) if op == "avg" else reduces(dtype)

    def sizes(self) -> list[int]:
        """Return the bytes to measure, in their order, before they are rounded to whole elements and parts."""
        return scan.series(self.minbytes, self.maxbytes, self.stepfactor, self.stepbytes)

    def dumps(self) -> str:
        """Return the options as text, for :meth:`loads`."""
        return json.dumps(asdict(self))

    @classmethod
    def loads(cls, text: str) -> Options:
        """Read the text that :meth:`dumps` wrote."""
        found: Mapping[str, Any] = json.loads(text)
        values: dict[str, Any] = {key: tuple(one) if isinstance(one, list) else one for key, one in found.items()}
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return, for the results, what was measured and how, without where it was to be written."""
        left_out = {"json", "csv", "plot", "compare", "tolerance", "command"}
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in left_out}


def _lacks(dtype: str) -> str:
    if not reduces(dtype):
        return "can be moved only; expected an operation that does that"
    return "has no averages; expected sum, product, min or max"


def chosen(
    name: str, given: Iterable[str], known: Sequence[str], aliases: Mapping[str, str]
) -> tuple[tuple[str, ...], bool]:
    """Return names out of comma lists, each once, in their order; and whether ``all`` was among them.

    Raises:
        ArgumentError: one is unknown.
    """
    found: dict[str, None] = {}
    everything = False
    for text in given:
        for word in (part.strip() for part in text.split(",")):
            one = aliases.get(word.lower(), word.lower())
            if one == "all":
                everything = True
            elif one not in known:
                raise ArgumentError(f"{name}: got {word!r:.40}; expected all or some of {', '.join(known)}")
            else:
                found[one] = None
    return (tuple(known) if everything else tuple(found)), everything


def operations(given: Iterable[str]) -> tuple[str, ...]:
    """Return operations by any of their names.

    Raises:
        ArgumentError: one is unknown.
    """
    return chosen("OPERATION", given, tuple(benchmarks()), aliases())[0] or (patterns.ALL_REDUCE.name,)


def reductions(given: str) -> tuple[tuple[str, ...], bool]:
    """Return reductions by any of their names, and whether all were asked for.

    Raises:
        ArgumentError: one is unknown.
    """
    return chosen("--op", [given], REDUCTIONS, {"prod": "product"})


def dtypes(given: str) -> tuple[tuple[str, ...], bool]:
    """Return types by any of their names, and whether all were asked for.

    Raises:
        ArgumentError: one is unknown.
    """
    return chosen("--datatype", [given], tuple(ITEM_BYTES), DTYPE_ALIASES)


def check_reduces(names: Iterable[str], op: str) -> None:
    """Refuse a reduction for operations that have none.

    Raises:
        ArgumentError: names them.
    """
    names = list(names)
    if not any(benchmark(name).reduces for name in names):
        reducing = ", ".join(name for name, one in benchmarks().items() if one.reduces)
        raise ArgumentError(f"--op: got {op} for {', '.join(names)}; expected one of {reducing} among the operations")


def root(given: str) -> int:
    """Return a rank, or -1 for ``all``.

    Raises:
        ArgumentError: it is neither.
    """
    if given == "all":
        return -1
    if not given.isdecimal():
        raise ArgumentError(f"--root: got {given!r:.40}; expected a rank of the group, or all")
    return int(given)


def words(name: str, given: str | None) -> tuple[str, ...]:
    """Return the words of a comma list, each once; nothing where it was not given.

    Raises:
        ArgumentError: one is empty.
    """
    if given is None:
        return ()
    found = [word.strip().lower() for word in given.split(",")]
    if not all(found):
        raise ArgumentError(f"{name}: got {given!r:.40}; expected names with a comma between them")
    return tuple(dict.fromkeys(found))


def peers(given: str | None) -> tuple[str, ...]:
    """Return peers by name.

    Raises:
        ArgumentError: one is unknown.
    """
    return chosen("--peers", words("--peers", given), PEERS, {})[0]
