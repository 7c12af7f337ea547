"""Every decoder on its corpus and on changed inputs, within bounds; and that broken ones are found out.

``nox -s fuzz`` runs the same table for longer, guided by coverage.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz import engines
from fuzz.bounds import Decoder, Finding, check, read_corpus
from fuzz.decoders import CORPUS, DECODERS
from fuzz.mutating import mutated
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Some decoders warn of every input that they refuse."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", DECODERS)
def test_what_is_kept(name: str) -> None:
    decoder = DECODERS[name]
    accepted = [check(decoder, data) for data in decoder.seeds()]  # a first use imports what it needs
    assert any(accepted), "no input gets far enough to be worth changing"
    for data in (*decoder.seeds(), *read_corpus(CORPUS, decoder)):
        check(decoder, data, exact=True)


@pytest.mark.parametrize("name", DECODERS)
@given(seed=st.integers(0, 2**32))
def test_what_is_changed(name: str, seed: int) -> None:
    decoder, chance = DECODERS[name], random.Random(seed)
    inputs = [*decoder.seeds(), *read_corpus(CORPUS, decoder)]
    check(decoder, mutated(chance.choice(inputs), inputs, decoder.kind, chance, engines.MOST_INPUT_BYTES))


def test_the_corpus_belongs_to_decoders() -> None:
    assert {path.name for path in CORPUS.iterdir()} <= set(DECODERS)
    sizes = [path.stat().st_size for path in CORPUS.glob("*/*")]
    assert max(sizes, default=0) <= engines.MOST_INPUT_BYTES


# --- decoders with a fault that hides behind a byte


def _broken(data: bytes) -> object:
    if data[:1] != b"!":
        raise ValueError("refused")
    return {}["missing"]


def _greedy(data: bytes) -> object:
    return bytearray(int(data) << 20)


def _slow(data: bytes) -> None:
    end = time.thread_time() + 1e-3 * int(data)
    while time.thread_time() < end:
        pass


def _wordy(data: bytes) -> object:
    raise ValueError(data.decode("utf-8", "surrogatepass") * 100)


@pytest.mark.parametrize(
    ("decode", "good", "bad", "text"),
    [
        (_broken, b"?", b"!", "raised KeyError: 'missing'"),
        (_greedy, b"1", b"200", "took 200 MiB"),
        (_greedy, b"1", b"9000000000", "raised MemoryError"),
        (_slow, b"1", b"1100", "of a core, more than 1 s"),
        (_wordy, b"x", b"x" * 100, "a message of 10000 bytes"),
        (_wordy, b"x", b"\xed\xa0\x80", "a message that cannot be printed"),
    ],
)
def test_what_breaks_a_bound_is_found(
    decode: object, good: bytes, bad: bytes, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fuzz.bounds.patience", lambda: 1.0)
    decoder = Decoder("broken", decode, (ValueError,), lambda: [good])  # type: ignore[arg-type]
    check(decoder, good, exact=True)
    with pytest.raises(Finding, match=text):
        check(decoder, bad, exact=True)


def test_an_engine_finds_a_fault_and_returns_the_input(tmp_path: Path) -> None:
    decoder = Decoder("broken", _broken, (ValueError,), lambda: [b"?"])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "kept").write_bytes(b" ")
    found = engines.run(decoder, tmp_path, 10.0, 1, None)
    assert "raised KeyError" in found.finding
    assert found.data is not None
    assert found.data[:1] == b"!"
    harmless = Decoder("harmless", bytes, (), lambda: [b"?"])
    found = engines.run(harmless, tmp_path, 0.2, 1, None)
    assert (found.finding, found.data) == ("", None)
    assert found.executions > 10
