"""Hold what a check found and what to do about it, and collect logged warnings for such findings."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias

from comm_utils.log import LOGGER_NAME

__all__ = ["LEVELS", "Finding", "Level", "from_error", "guarded", "warnings_logged", "worst"]

Level: TypeAlias = Literal["ok", "warning", "problem"]

#: from good to bad
LEVELS: tuple[Level, ...] = ("ok", "warning", "problem")

# How the remedy in the message of a CommError begins.
_REMEDY = re.compile(r"(set|unset|check|install|reinstall|start|pass|use|give|choose|call|build|leave)\b|it needs ")


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        level: ``problem``: something will fail; ``warning``: something may, or is slower than it has to be.
        check: what was looked at; one of a fixed set of names.
        found, remedy: for people; the remedy is empty where there is nothing to do.
        of_host: true of every rank of the host.
        ranks: those it is true of; empty for the job as a whole.
    """

    level: Level
    check: str
    found: str
    remedy: str = ""
    of_host: bool = False
    ranks: tuple[int, ...] = ()


def worst(findings: Iterable[Finding]) -> Level:
    """Return the worst level among them; ``ok`` where there is none."""
    return max((one.level for one in findings), key=LEVELS.index, default="ok")


def from_error(check: str, error: BaseException) -> Finding:
    """Make a finding of an error: its text, and its remedy apart."""
    text = str(error).strip() or type(error).__name__
    text = text.removeprefix("init_distributed: ")
    if isinstance(error, RuntimeError | ValueError | OSError) and type(error).__module__ != "builtins":
        found, _, remedy = text.rpartition("; ")
        if found and _REMEDY.match(remedy):
            return Finding("problem", check, found, remedy)
        return Finding("problem", check, text)
    return Finding("problem", check, f"{type(error).__name__}: {text.splitlines()[0]}")


def guarded(check: str, look: Callable[[], list[Finding]]) -> list[Finding]:
    """Call ``look`` and return its findings; its failure is a finding as well."""
    try:
        return look()
    except Exception as error:
        return [from_error(check, error)]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().removeprefix("init_distributed: "))


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Collect the messages that are logged in the block, from level WARNING."""
    logger, collector = logging.getLogger(LOGGER_NAME), _Collector()
    propagate = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
