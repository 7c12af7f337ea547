"""The planted faults: that each has its place, and that a fault is told from none."""

from __future__ import annotations

from pathlib import Path

import pytest

import mutate

FAULTS = mutate.read()


def test_there_are_enough() -> None:
    assert len({fault.name for fault in FAULTS}) == len(FAULTS) >= 60


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_has_its_place_and_its_tests(fault: mutate.Fault) -> None:
    assert (mutate.ROOT / fault.file).read_text().count(fault.before) == 1
    assert fault.before != fault.after
    if fault.tests.startswith(mutate.NATIVE):
        assert fault.tests.removeprefix(mutate.NATIVE) in mutate.NATIVE_GROUPS
    else:
        assert all((mutate.ROOT / one).exists() for one in fault.tests.split() if "/" in one)


@pytest.mark.parametrize(("after", "expected"), [("== 3", True), ("> 1", False)])
def test_a_fault_is_caught_or_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: str, expected: bool
) -> None:
    source = tmp_path / "test_two.py"
    source.write_text("def test_two():\n    assert 1 + 1 == 2\n")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    assert mutate.is_caught(mutate.Fault("two", "test_two.py", "== 2", after, "test_two.py")) is expected
    assert source.read_text().endswith("== 2\n")


def test_a_place_that_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "one.py").write_text("one")
    monkeypatch.setattr(mutate, "ROOT", tmp_path)
    with pytest.raises(ValueError, match=r"got 0 places in one\.py; expected 1"):
        mutate.is_caught(mutate.Fault("two", "one.py", "two", "", ""))
