"""One logger, the rank in front of every line, and no handler where the program has its own."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest

from comm_utils import log


@pytest.fixture
def new_program(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """Call it to be in a program that has not set up logging. (pytest adds its own handlers after all fixtures.)"""
    level = log.logger.level

    def without_handlers() -> None:
        monkeypatch.setattr(logging.getLogger(), "handlers", [])
        monkeypatch.setattr(log.logger, "handlers", [])
        log.logger.setLevel(logging.NOTSET)

    yield without_handlers
    log.logger.setLevel(level)
    log.remember_rank(None)


def shown(handlers: list[logging.Handler]) -> list[logging.Handler]:
    return [handler for handler in handlers if not isinstance(handler, logging.NullHandler)]


def test_silent_until_shown(new_program: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    new_program()
    log.logger.info("nobody asked")
    log.show_on_stderr()
    log.logger.info("hello")
    log.logger.debug("too much")
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d INFO comm: hello\n", err)


def test_warnings_are_seen_without_any_setting_up() -> None:
    program = "from comm_utils.log import logger; logger.info('quiet'); logger.warning('look: %d', 3)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "look: 3\n")


def test_rank_in_front(new_program: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    new_program()
    log.show_on_stderr()
    log.remember_rank(3)
    log.logger.warning("%d of %d", 1, 2)
    log.remember_rank(0)
    log.logger.warning("zero counts")
    log.remember_rank(None)
    log.logger.warning("none")
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.endswith("WARNING [rank 3] comm: 1 of 2")
    assert second.endswith("WARNING [rank 0] comm: zero counts")
    assert third.endswith("WARNING comm: none")


def test_shown_once_however_often_asked(new_program: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    new_program()
    log.show_on_stderr()
    log.show_on_stderr()
    log.logger.info("once")
    assert capsys.readouterr().err.count("once") == 1


@pytest.mark.parametrize("owner", ["root", "comm"])
def test_a_programs_own_handlers_are_enough(
    new_program: Callable[[], None], capsys: pytest.CaptureFixture[str], owner: str
) -> None:
    new_program()
    stream = io.StringIO()
    target = logging.getLogger() if owner == "root" else log.logger
    target.addHandler(logging.StreamHandler(stream))
    before = len(shown(log.logger.handlers))
    log.show_on_stderr()
    log.logger.info("mine")
    assert len(shown(log.logger.handlers)) == before
    assert stream.getvalue() == "mine\n"
    assert capsys.readouterr().err == ""


def test_a_programs_own_level_stays(new_program: Callable[[], None]) -> None:
    new_program()
    log.logger.setLevel(logging.ERROR)
    log.show_on_stderr()
    assert log.logger.level == logging.ERROR


def test_level(new_program: Callable[[], None], capsys: pytest.CaptureFixture[str]) -> None:
    new_program()
    log.show_on_stderr(logging.WARNING)
    log.logger.info("no")
    log.logger.warning("yes")
    assert capsys.readouterr().err.splitlines()[-1].endswith("yes")
    assert log.logger.level == logging.WARNING


def test_stderr_is_looked_up_for_every_line(new_program: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    new_program()
    log.show_on_stderr()
    redirected = io.StringIO()
    monkeypatch.setattr(sys, "stderr", redirected)
    log.logger.info("over here")
    assert redirected.getvalue().endswith("comm: over here\n")


PIPE_THAT_NOBODY_READS = """
import logging, os, sys, threading
from comm_utils.log import logger, show_on_stderr
{set_up}
os.set_blocking(2, False)
try:
    while True:
        os.write(2, b"x" * {chunk})
except BlockingIOError:
    pass
os.set_blocking(2, True)
thread = threading.Thread(target=logger.warning, args=("%s", "late " * {words}), name="comm-watch", daemon=True)
thread.start()
thread.join(20)
print(thread.is_alive(), flush=True)
"""


@pytest.mark.parametrize("set_up", ["", "show_on_stderr()", "logging.basicConfig()"])
@pytest.mark.parametrize(("chunk", "words"), [(1, 10), (4096, 10), (60_000, 2000)])
def test_a_thread_of_the_library_does_not_wait_for_a_reader(set_up: str, chunk: int, words: int) -> None:
    program = PIPE_THAT_NOBODY_READS.format(set_up=set_up, chunk=chunk, words=words)
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "False\n"
            assert process.wait(60) == 0
        finally:
            process.kill()


def test_a_thread_of_the_library_writes_where_there_is_room() -> None:
    program = (
        "import threading; from comm_utils.log import logger;"
        "thread = threading.Thread(target=logger.warning, args=('late',), name='comm-watch');"
        "thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "late\n"
