"""What the packages warn of in their log, as findings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from comm_utils.log import LOGGER_NAME

__all__ = ["warnings_logged"]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage().removeprefix("init_distributed: "))


@contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """The messages that are logged in the block, from level WARNING."""
    logger, collector = logging.getLogger(LOGGER_NAME), _Collector()
    propagate = logger.propagate
    logger.addHandler(collector)
    logger.propagate = False
    try:
        yield collector.messages
    finally:
        logger.removeHandler(collector)
        logger.propagate = propagate
