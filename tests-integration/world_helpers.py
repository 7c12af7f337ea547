"""Worlds on each library, the variables of a process, and what it logs, for the ranks of several files of tests."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterator
from typing import Any

import comm_orchestrator as dist

__all__ = ["BACKENDS", "Log", "environment", "logged", "on", "world_on"]

#: The library and what chooses its engine.
BACKENDS: dict[str, tuple[str, dict[str, str]]] = {
    "gloo": ("gloo", {}),
    "shared memory": ("ccl", {}),
    "oneCCL": ("ccl", {"CCL_SHARED_MEMORY": "0"}),
}


@contextlib.contextmanager
def environment(**changes: str | None) -> Iterator[None]:
    """Change variables of this process; None removes one. Afterwards they are what they were."""
    before = dict(os.environ)
    try:
        for name, value in changes.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def world_on(backend: str) -> Iterator[None]:
    """Make a world on one of :data:`BACKENDS`, on every rank."""
    library, variables = BACKENDS[backend]
    os.environ.update(variables)
    dist.init_distributed(library, verbose=False, timeout=60)
    try:
        yield
    finally:
        dist.destroy_process_group()
        for name in variables:
            del os.environ[name]


def on(backend: str, body: Callable[..., Any], *args: Any) -> Any:
    """Call ``body`` on every rank of a world on ``backend``."""
    with world_on(backend):
        return body(*args)


class Log(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def at(self, level: str) -> list[str]:
        return [message for name, message in self.lines if name == level]


@contextlib.contextmanager
def logged(level: int = logging.DEBUG) -> Iterator[Log]:
    """Keep what the packages log, from ``level``."""
    log, logger = Log(), logging.getLogger("comm")
    before = logger.level
    logger.addHandler(log)
    logger.setLevel(level)
    try:
        yield log
    finally:
        logger.removeHandler(log)
        logger.setLevel(before)
