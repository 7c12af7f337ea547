"""The rows of the matrix: what each fault is at each moment, which scene plays it, and what is asked of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from faults.expected import LIMIT_S, RIGHT, Expected, failing, mismatch, right

__all__ = ["CULPRIT", "FAULTS", "WORLD_SIZE", "Fault"]

WORLD_SIZE = 3
#: The rank that does it, in most rows.
CULPRIT = 1
_DEAD = (r"\brank 1\b", r"\bpid {pid}\b", "all_reduce")
_WAITED_FOR = (r"\branks? 1\b", "all_reduce")


@dataclass(frozen=True)
class Fault:
    """A row.

    Attributes:
        title: how tables call it.
        scene: ``module:function`` below ``faults.scenes``, which every rank runs.
        what: moment -> what happens.
        expected: what is asked, or the same by moment.
        unless: moment or backend -> why there is no such cell.
        mismatch: whether ranks make calls that do not belong together.
        hosts: on how many hosts the ranks run.
        isolated: whether the hosts need namespaces of their own, because the scene fills a file system or cuts a link.
        dies: whether the culprit's process ends, or stops for good.
        culprit: the rank that does it, or to which it is done.
    """

    title: str
    scene: str
    what: Mapping[str, str]
    expected: Expected | Mapping[str, Expected]
    unless: Mapping[str, str] = field(default_factory=dict)
    mismatch: bool = False
    hosts: int = 1
    isolated: bool = False
    dies: bool = False
    culprit: int = CULPRIT

    def expects(self, moment: str) -> Expected:
        """Return what is asked at this moment."""
        return self.expected if isinstance(self.expected, Expected) else self.expected[moment]


def _what(before: str, during: str, after: str) -> dict[str, str]:
    return {"before": before, "during": during, "after": after}


def _dying(title: str, scene: str, how: str, expected: Expected, during: str = "") -> Fault:
    what = _what(
        f"Rank 1 {how} before the group's first call.",
        f"Rank 1 {during or how} while it and rank 0 wait in a call for rank 2.",
        f"Rank 1 {how} after three calls that were right.",
    )
    return Fault(title, scene, what, expected, dies=True)


def _differing(title: str, scene: str, how: str, expected: Expected) -> Fault:
    what = _what(
        f"In the group's first call, rank 1 {how}.",
        f"Ranks 0 and 2 wait in a call when rank 1 {how}.",
        f"After three calls that were right, rank 1 {how}.",
    )
    return Fault(title, scene, what, expected, mismatch=True)


_LOST = failing("PeerLostError", names=_DEAD)
_STOPPED = failing("PeerLostError", "CommTimeoutError", names=(*_WAITED_FOR, "stopped"))
#: A library may have what it needs already.
_LACKING_MEMORY = Expected(
    (RIGHT, "BackendUnavailableError", "CommTimeoutError", "PeerLostError"),
    names=(*_DEAD, "allocate|memory"),
    culprit_names=("all_reduce", "allocate|memory"),
    culprit=True,
)
_START_FAILED = "the group exists by then, so that the start cannot fail any more"

FAULTS: dict[str, Fault] = {
    "sigkill": _dying("SIGKILL", "ending:killed", "is killed", _LOST),
    "sigstop": _dying("SIGSTOP", "ending:stopped", "is stopped, and stays stopped,", _STOPPED),
    "exception": _dying(
        "exception",
        "ending:raises",
        "raises an exception that nobody catches",
        _LOST,
        "raises an exception, which nobody catches, between an asynchronous call and its wait",
    ),
    "exit-0": _dying(
        "exit(0)",
        "ending:exits",
        "ends with sys.exit(0)",
        _LOST,
        "ends with sys.exit(0) between an asynchronous call and its wait",
    ),
    "segfault": _dying("segfault", "ending:crashes", "reads address 0", _LOST),
    "slow-rank": Fault(
        "slow rank",
        "ending:slow",
        _what(
            f"Rank 1 comes {LIMIT_S / 4:g} s late to the group's first call.",
            f"Rank 1 is stopped for {LIMIT_S / 4:g} s in a call, and goes on.",
            f"After three right calls, rank 1 comes {LIMIT_S / 2:g} s later than the timeout.",
        ),
        {
            "before": right(),
            "during": right(),
            "after": failing("CommTimeoutError", names=_WAITED_FOR, culprit=True, culprit_names=("all_reduce",)),
        },
    ),
    "keyboard-interrupt": _dying(
        "KeyboardInterrupt", "ending:interrupted", "gets SIGINT, which nobody catches,", _LOST
    ),
    "wrong-shape": _differing(
        "wrong shape", "mismatching:shape", "adds 900 numbers, the others 1000", mismatch("all_reduce", "900", "1000")
    ),
    "wrong-dtype": _differing(
        "wrong dtype",
        "mismatching:dtype",
        "adds int32, the others float32",
        mismatch("all_reduce", "int32", "float32"),
    ),
    "wrong-op": _differing(
        "wrong op",
        "mismatching:op",
        "asks for the maximum, the others for the sum",
        mismatch("all_reduce", "max", "sum"),
    ),
    "wrong-root": _differing(
        "wrong root",
        "mismatching:root",
        "broadcasts from rank 1, the others from rank 0",
        mismatch("broadcast", "root|src"),
    ),
    "group-order": _differing(
        "order across two groups",
        "mismatching:order",
        "calls on the second group first, the others on the first",
        mismatch("all_reduce", "group"),
    ),
    "missing-call": _differing(
        "missing call",
        "mismatching:missing",
        "leaves out an all_reduce and goes on with a broadcast",
        mismatch("all_reduce", "broadcast"),
    ),
    "extra-call": _differing(
        "extra call",
        "mismatching:extra",
        "makes a broadcast more before the all_reduce",
        mismatch("all_reduce", "broadcast"),
    ),
    "forked-child": Fault(
        "forked child calling in",
        "intruding:forked_child",
        _what(
            "A forked child of rank 1 calls all_reduce before the group's first call.",
            "A forked child of rank 1 calls all_reduce while an asynchronous call waits for rank 2.",
            "A forked child of rank 1 calls all_reduce after three calls that were right.",
        ),
        right(child=("BackendUnavailableError",)),
    ),
    "two-threads": Fault(
        "two threads in one group",
        "intruding:two_threads",
        _what(
            "Two threads of rank 1 make the group's first two calls, in another order than the others.",
            "Two threads of every rank make ten equal calls each, at once.",
            "After three right calls, two threads of rank 1 make two calls in another order than the others.",
        ),
        {
            "before": mismatch("all_reduce", "broadcast"),
            "during": right(),
            "after": mismatch("all_reduce", "broadcast"),
        },
    ),
    "store-killed": Fault(
        "store killed",
        "starting:store_killed",
        _what(
            "The process with the store is killed before the ranks meet there.",
            "The process with the store is killed while ranks wait in a call; they go on, and then make a group.",
            "The process with the store is killed after three right calls; the ranks go on, and then make a group.",
        ),
        {
            "before": failing("CommError", names=("init_distributed", "store|127.0.0.1"), culprit=True),
            "during": failing("CommError", names=("new_group|all_reduce", "store|rank 0"), culprit=True),
            "after": failing("CommError", names=("new_group|all_reduce", "store|rank 0"), culprit=True),
        },
    ),
    "port-taken": Fault(
        "port taken",
        "starting:port_taken",
        _what(
            "Another program listens at the port of rank 0 at the first start.",
            "",
            "Another program listens at the port of rank 0 at the second start in the same processes.",
        ),
        failing("CommError", names=("init_distributed", "{port}"), culprit=True, culprit_names=("{port}",)),
        {"during": f"The port is bound at the start alone: {_START_FAILED}."},
    ),
    "duplicate-rank": Fault(
        "duplicate rank",
        "starting:duplicate_rank",
        _what(
            "Two processes have rank 0 at the first start.",
            "",
            "Two processes have rank 0 at the second start in the same processes.",
        ),
        failing("LaunchError", names=("two processes have rank 0", "{pid}"), culprit=True),
        {"during": f"Ranks are given at the start alone: {_START_FAILED}."},
    ),
    "world-size": Fault(
        "world size disagreement",
        "starting:world_size",
        _what(
            "Rank 1 gets a world size of 4 at the first start, the others 3.",
            "",
            "Rank 1 gets a world size of 4 at the second start in the same processes.",
        ),
        failing("LaunchError", names=("rank 1 .{{0,80}}says 4",), culprit=True),
        {"during": f"The world size is given at the start alone: {_START_FAILED}."},
    ),
    "memory-limit": Fault(
        "memory limit reached",
        "starving:memory",
        _what(
            "Rank 1 may map 1 MiB more when the ranks start.",
            "Rank 1 reaches its limit of memory while 64 MiB are being added.",
            "After three right calls, rank 1 may map 1 MiB more, and 64 MiB are to be added.",
        ),
        {
            # Not even enough is left to tell the others why: they name who is missing.
            "before": failing("CommError", names=("rank 1",), culprit=True, culprit_names=("rank 1 can map",)),
            "during": _LACKING_MEMORY,
            "after": _LACKING_MEMORY,
        },
    ),
    "descriptor-limit": Fault(
        "file-descriptor limit",
        "starving:descriptors",
        _what(
            "Rank 1 may open 1 file more when the ranks start.",
            "Rank 1 may open no file more from a call on, which waits for rank 2.",
            "After three right calls, rank 1 may open no file more, and the ranks make a group.",
        ),
        {
            "before": failing(
                "CommError", names=("init_distributed", r"\branks? 1\b"), culprit=True, culprit_names=("can open",)
            ),
            "during": right(),
            # A group of oneCCL needs no more files.
            "after": Expected((RIGHT, "BackendUnavailableError"), culprit=True),
        },
    ),
    "disk-full": Fault(
        "disk full for the rings",
        "starving:disk",
        _what(
            "The file system of the rings is full when the ranks start.",
            "The file system of the rings fills up while ranks wait in a call.",
            "The file system of the rings fills up after three right calls.",
        ),
        {
            "before": Expected((RIGHT, "BackendUnavailableError"), ("space",), ("space",), warning="no space|full"),
            "during": right(),
            "after": right(),
        },
        isolated=True,
    ),
    "link-down": Fault(
        "link down between two hosts",
        "intruding:link_down",
        _what(
            "The link to the host of rank 2 goes down before the group's first call.",
            "The link to the host of rank 2 goes down while ranks 0 and 1 wait in a call.",
            "The link to the host of rank 2 goes down after three right calls.",
        ),
        failing(
            "PeerLostError",
            "CommTimeoutError",
            names=(r"\branks? 2\b", "all_reduce"),
            culprit=True,
            culprit_names=(r"\branks? [01]\b", "all_reduce"),
            again=False,
        ),
        {
            "shm": "Ranks of two hosts share no memory: oneCCL serves them, which has its own column.",
            "before/oneccl": "oneCCL connects the ranks while the world is made, for which the link is needed.",
        },
        hosts=2,
        isolated=True,
        culprit=2,
    ),
    "corrupted-ring": Fault(
        "corrupted ring file",
        "intruding:corrupted_ring",
        _what(
            "The ring of rank 1 is overwritten with random bytes before the group's first call; later it is killed.",
            "The ring of rank 1 is overwritten while ranks wait in a call; later it is killed.",
            "The ring of rank 1 is overwritten after three right calls; later it is killed.",
        ),
        failing("PeerLostError", "CommTimeoutError", names=_WAITED_FOR),
        dies=True,
    ),
}
