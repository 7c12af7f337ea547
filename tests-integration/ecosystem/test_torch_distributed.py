"""torch's own tests of ``torch.distributed``, on three ranks: through our API on gloo, and unchanged on ccl.

They are the tests of ``DistributedTest._DistTestBase`` in ``torch.testing._internal.distributed.distributed_test``,
which is in the wheel. ``torch_distributed.json`` says which of them are skipped or fail, and why; a test that does
something else than it says fails here. The list is that of the torch in ``constraints.txt``. Tests that torch leaves
out on gloo run as well, as some of them pass.

All of them run on the same ranks, a world for each test. After a test that some ranks did not end, new ones go on.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from torch.distributed import TCPStore

import comm_orchestrator as dist
from comm_utils.testing import RankOutcome, patience, preload, run_ranks_outcomes

RANKS = 3
MODULE = "torch.testing._internal.distributed.distributed_test"
TARGET = "torch_tests:run_tests"
ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    # The tests send objects of classes of their own.
    "COMM_OBJECTS__ALLOW_PICKLE": "1",
}
# For all tests of a subject; and after the first rank has failed, for the others, which wait for it.
ALL_S, GRACE_S = 300.0, 1.0
# Sets of ranks that may be lost for one subject before the rest is given up.
MOST_SETS = 25
CCL = dist.available_backends()["ccl"]
#: By name in the list: the backend, and whether the tests call our API in the place of torch.distributed.
SUBJECTS = {"facade": ("gloo", True), "ccl": ("ccl", False)}

#: What each rank says of a test: "passed", "skipped" or "failed", and why.
Said: TypeAlias = list[tuple[str, str]]
Results: TypeAlias = Callable[[str], dict[str, Said]]


def names_of_tests() -> list[str]:
    """Return the names of the tests in the order of the file, which is not imported."""
    spec = importlib.util.find_spec(MODULE)
    assert spec is not None
    assert spec.origin is not None
    (base,) = (
        node
        for node in ast.walk(ast.parse(Path(spec.origin).read_text()))
        if isinstance(node, ast.ClassDef) and node.name == "_DistTestBase"
    )
    found = [node.name for node in base.body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    return list(dict.fromkeys(found))


def by_test(reasons: dict[str, list[str]]) -> dict[str, str]:
    return {name: reason for reason, listed in reasons.items() for name in listed}


EXPECTED: dict[str, Any] = json.loads(Path(__file__).with_suffix("").with_name("torch_distributed.json").read_text())
SKIPPED = by_test(EXPECTED["skipped"])
FAILS = {subject: by_test(EXPECTED["fails"]["both"]) | by_test(EXPECTED["fails"][subject]) for subject in SUBJECTS}
UNPROFILED = {subject: by_test(EXPECTED["unprofiled"][subject]) for subject in SUBJECTS}
TESTS = names_of_tests() if importlib.util.find_spec("expecttest") else []

pytestmark = pytest.mark.skipif(not TESTS, reason="torch's test class needs expecttest")
subjects = pytest.mark.parametrize(
    "subject",
    ["facade", pytest.param("ccl", marks=pytest.mark.skipif(not CCL.usable, reason=CCL.reason))],
    scope="module",
)


@pytest.fixture(scope="module", autouse=True)
def _imported_once() -> Iterator[None]:
    folder = str(Path(__file__).parent)
    sys.path.append(folder)
    preload("torch_tests")
    yield
    sys.path.remove(folder)


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """``results(subject)``: what became of the selected tests, which run at the first call."""
    found: dict[str, dict[str, Said]] = {}

    def of(subject: str) -> dict[str, Said]:
        if subject not in found:
            calls = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
            chosen = {call["name"] for call in calls if call.get("subject") == subject and "name" in call}
            found[subject] = run_all(subject, [name for name in TESTS if name in chosen], tmp_path_factory)
        return found[subject]

    return of


def run_all(subject: str, names: list[str], folders: pytest.TempPathFactory) -> dict[str, Said]:
    backend, through_ours = SUBJECTS[subject]
    found: dict[str, Said] = {}
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    for _ in range(MOST_SETS):
        left = [name for name in names if name not in found]
        if not left:
            break
        folder = folders.mktemp(subject)
        args = (left, backend, through_ours, str(folder), store.port, list(UNPROFILED[subject]))
        outcomes = run_ranks_outcomes(
            TARGET, RANKS, *args, timeout_s=ALL_S * patience(), grace_s=GRACE_S, env=ENVIRONMENT
        )
        said = [lines(folder / f"rank-{rank}") for rank in range(RANKS)]
        for name in left:
            found[name] = [
                ranks[name] if name in ranks else ("failed", ended(outcome))
                for ranks, outcome in zip(said, outcomes, strict=True)
            ]
            if not all(name in ranks for ranks in said):
                break
    return found


def lines(path: Path) -> dict[str, tuple[str, str]]:
    if not path.exists():
        return {}
    return {name: (state, reason) for name, state, reason in map(json.loads, path.read_text().splitlines())}


def ended(outcome: RankOutcome) -> str:
    return f"{outcome.describe()}\n{outcome.traceback or ''}\n{outcome.stderr[-3000:]}"


@subjects
@pytest.mark.parametrize("name", TESTS)
def test_of_torch(name: str, subject: str, results: Results) -> None:
    said = results(subject).get(name)
    assert said is not None, f"it did not run, as {MOST_SETS} sets of ranks were lost"
    states = {state for state, _ in said}
    expected = "skipped" if name in SKIPPED else "failed" if name in FAILS[subject] else "passed"
    state = "failed" if "failed" in states else "passed" if "passed" in states else "skipped"
    if state != expected:
        listed = SKIPPED.get(name) or FAILS[subject].get(name) or "not at all"
        told = "\n".join(f"rank {rank}: {state}: {reason}" for rank, (state, reason) in enumerate(said))
        pytest.fail(f"it is listed as {expected} ({listed}), and has {state}\n{told}", pytrace=False)


def test_the_list_names_tests_that_exist() -> None:
    listed = {*SKIPPED, *(name for lists in (FAILS, UNPROFILED) for names in lists.values() for name in names)}
    assert listed <= set(TESTS)
    assert not {name for fails in FAILS.values() for name in fails} & set(SKIPPED)
