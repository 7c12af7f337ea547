"""The lines of the program from which calls are made, as records have them."""

from __future__ import annotations

import re
import sys
import threading
from types import CodeType, FrameType

from comm_utils.flight_recorder.layout import EntryType
from comm_utils.flight_recorder.memory import RingMemory

__all__ = ["LIBRARY", "CallSites", "line_of_program", "of_this_library", "runs_program", "site_of"]

#: The standard library and torch, by their paths on any host: frames there do not tell what the program does.
LIBRARY = re.compile(r"/lib\d*/python3[^/]*/(?!(site|dist)-packages/)|/(site|dist)-packages/torch/|^<frozen ")
_INSTALLED = re.compile(r"/(site|dist)-packages/")

# So many are remembered.
_MOST_SITES = 65536
_LONGEST_SITE = 1000
# The packages of this family: the caller is the first frame outside of them.
_OURS = ("comm_utils", "comm_backend_torch", "comm_backend_ccl", "comm_collectives", "comm_orchestrator")
# Generated heads of collectives have no name.
_NAMELESS = "<head of comm_collectives."
_TORCH = "torch"
# Modules whose functions wrap any other: their lines say nothing about who called.
_WRAPPERS = frozenset(("contextlib", "functools", "deepspeed.utils.nvtx"))


class CallSites:
    """The places in code that were seen, and their entries in one ring.

    Args:
        memory: of the ring.
        lock: held while an entry is added.

    Attributes:
        known: by code and place in it, the entry; -1 where it is not of the program.
    """

    def __init__(self, memory: RingMemory, lock: threading.RLock) -> None:
        self.known: dict[tuple[int, int], int] = {}
        self._memory, self._lock = memory, lock
        self._codes: list[CodeType] = []  # so that their ids stay theirs
        self._entries: dict[str, int] = {}

    def entry(self, innermost: FrameType) -> int:
        """Return the entry of the innermost frame of the program, from ``innermost`` on; 0 where there is none.

        Frames of this family of packages, of torch, which calls hooks, and of modules that wrap functions, such as
        contextlib, are not the program's.
        """
        frame: FrameType | None = innermost
        known = self.known
        while frame is not None:
            code = frame.f_code
            found = known.get((id(code), frame.f_lasti))
            if found is None:
                found = self._note(frame, (id(code), frame.f_lasti), _is_of_program(frame))
            if found >= 0:
                return found
            frame = frame.f_back
        return self._entry_in_torch(innermost)

    def _entry_in_torch(self, innermost: FrameType) -> int:
        """Return the entry of the innermost frame of torch, where a thread runs nothing else but our packages."""
        frame: FrameType | None = innermost
        while frame is not None:
            if _package_of(frame) == _TORCH:
                place = id(frame.f_code), -1 - frame.f_lasti  # which no frame has
                found = self.known.get(place)
                return self._note(frame, place, True) if found is None else found
            frame = frame.f_back
        return 0

    def _note(self, frame: FrameType, place: tuple[int, int], is_program: bool) -> int:
        """Remember a place, and return its entry; -1 where it is not of the program."""
        if not is_program:
            found = -1
        else:
            # Code that is compiled again and again, as cells of notebooks are, has the same text each time.
            text = site_of(frame)
            with self._lock:
                found = self._entries.get(text, -1)
                if found < 0:
                    if len(self._entries) >= _MOST_SITES:
                        return 0
                    found = self._entries[text] = self._memory.add_entry(EntryType.CALLER, text)
        if len(self.known) >= _MOST_SITES:
            return found
        self._codes.append(frame.f_code)
        self.known[place] = found
        return found


def _package_of(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__") or "").partition(".")[0]


def _is_of_program(frame: FrameType) -> bool:
    package = _package_of(frame)
    return (
        package not in _OURS
        and package != _TORCH
        and frame.f_globals.get("__name__") not in _WRAPPERS
        and not frame.f_code.co_filename.startswith(_NAMELESS)
    )


def runs_program(frame: FrameType | None, counts_packages: bool = True) -> bool:
    """Return whether a thread that is in ``frame`` runs code of the program, and not of libraries alone.

    Args:
        counts_packages: installed packages other than torch and ours are the program's, too.
    """
    while frame is not None:
        file = frame.f_code.co_filename
        if _is_of_program(frame) and not LIBRARY.search(file) and (counts_packages or not _INSTALLED.search(file)):
            return True
        frame = frame.f_back
    return False


def site_of(frame: FrameType) -> str:
    """Return where a frame is, as records have it."""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} {frame.f_code.co_name}"[-_LONGEST_SITE:]


def line_of_program() -> str:
    """Return the line of the program that this thread runs, as :meth:`CallSites.entry` finds it; "" for none."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and not _is_of_program(frame):
        frame = frame.f_back
    return "" if frame is None else site_of(frame)


def of_this_library(site: str) -> bool:
    """Return whether a frame, as records have it, is of this family's packages."""
    return any(f"/{package}/" in site for package in _OURS)
