"""Slurm's compressed lists of hosts and of task counts.

Source: https://slurm.schedmd.com/scontrol.html ("hostlist" expressions), https://slurm.schedmd.com/srun.html
(``SLURM_TASKS_PER_NODE``)
"""

from __future__ import annotations

import re
from itertools import product
from math import prod

from comm_utils.errors import LaunchError

__all__ = ["MAX_HOSTS", "expand_counts", "expand_hosts"]

#: So many hosts are expanded; a cluster of Slurm has at most 65,533 (``MaxNodeCount`` in slurm.conf).
MAX_HOSTS = 1 << 16

# A host is text and brackets in any order; a comma inside brackets does not end it.
_HOST = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_PART = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
# More digits than a number needs would make names, or the conversion, arbitrarily large.
_RANGE = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")
_COUNT = re.compile(r"([0-9]{1,18})(?:\(x([0-9]{1,18})\))?")
_LONGEST_NAME = 255
_SHOWN = 200


def expand_hosts(text: str, source: str = "host list") -> list[str]:
    """``node[01-04,7],login1`` → node01, node02, node03, node04, node7, login1.

    Several brackets in a name vary like the digits of a number, the last one fastest.

    Raises:
        LaunchError: ``text`` is no host list; names ``source``.
    """
    hosts: list[str] = []
    position = 0
    while match := _HOST.match(text, position):
        parts: list[list[str]] = []
        for ranges, literal in _PART.findall(match.group()):
            parts.append([literal] if literal else _expand_brackets(ranges, text, source))
            if len(hosts) + prod(map(len, parts)) > MAX_HOSTS:  # before more brackets are expanded
                raise _too_many(text, source)
        if sum(max(map(len, part)) for part in parts) > _LONGEST_NAME:
            raise _no_host_list(text, source)
        hosts += map("".join, product(*parts))
        position = match.end()
        if position == len(text):
            return hosts
        if text[position] != ",":
            break
        position += 1
    raise _no_host_list(text, source)


def _expand_brackets(ranges: str, text: str, source: str) -> list[str]:
    numbers: list[str] = []
    for one in ranges.split(","):
        match = _RANGE.fullmatch(one)
        if match is None:
            raise _no_host_list(text, source)
        first, last = match[1], match[2] or match[1]
        if int(last) < int(first):
            raise _no_host_list(text, source)
        if int(last) - int(first) >= MAX_HOSTS - len(numbers):
            raise _too_many(text, source)
        # The lower bound's zeros say how wide the numbers are.
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers


def _no_host_list(text: str, source: str) -> LaunchError:
    return LaunchError(f"{source}: got {text[:_SHOWN]!r}; expected a list of hosts such as 'node[01-04,7],login1'")


def _too_many(text: str, source: str) -> LaunchError:
    return LaunchError(f"{source}: got {text[:_SHOWN]!r}, of more than {MAX_HOSTS} hosts; expected at most so many")


def expand_counts(text: str, source: str = "task counts") -> list[int]:
    """``2(x3),1`` → 2, 2, 2, 1.

    Raises:
        LaunchError: ``text`` is no list of counts; names ``source``.
    """
    counts: list[int] = []
    for one in text.split(","):
        match = _COUNT.fullmatch(one)
        if match is None:
            raise LaunchError(f"{source}: got {text[:_SHOWN]!r}; expected task counts such as '2(x3),1'")
        if len(counts) + int(match[2] or 1) > MAX_HOSTS:
            raise _too_many(text, source)
        counts += [int(match[1])] * int(match[2] or 1)
    return counts
