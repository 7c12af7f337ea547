"""DeepSpeed's 1-bit optimizers and ZeRO++ on this API, and a release that has the former no more."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from deepspeed_processes import launcher, run  # noqa: E402

pytest.importorskip("deepspeed", reason="DeepSpeed is installed by nox -s ecosystem only", exc_type=ImportError)

OPTIMIZERS = ("OnebitAdam", "OnebitLamb", "ZeroOneAdam")
STEPS = 24
#: A folder with a release that has no 1-bit optimizers.
NEWEST = os.environ.get("DEEPSPEED_NEWEST", "")

Trained = Callable[[str], list[dict[str, Any]]]


def on_two_ranks(out: Path, script: str, *arguments: str, env: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Return what both ranks of a script wrote down."""
    kind, *more = arguments
    run(*launcher(), str(Path(_HERE, script)), kind, str(out), *more, timeout_s=240, env=env)
    return [json.loads(Path(out, f"rank{rank}.json").read_text()) for rank in (0, 1)]


# --- 1-bit optimizers


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    found: dict[str, list[dict[str, Any]]] = {}

    def train(kind: str) -> list[dict[str, Any]]:
        if kind not in found:
            found[kind] = on_two_ranks(tmp_path_factory.mktemp(kind), "onebit_training.py", kind, str(STEPS))
        return found[kind]

    return train


@pytest.mark.parametrize(("kind", "backend"), [("replaced", "gloo"), ("replaced-ccl", "ccl")])
def test_they_train_without_cupy_and_mpi(trained: Trained, kind: str, backend: str) -> None:
    for one in trained(kind):
        assert (one["backend"], one["imported"]) == (backend, [])
        plain = sum(one["optimizers"]["Adam"]["losses"][-4:]) / 4
        for name, transport in zip(OPTIMIZERS, ("NcclBackend", "MpiBackend", "CompressedBackend"), strict=True):
            outcome = one["optimizers"][name]
            assert outcome["transport"] == f"comm_orchestrator.facade.deepspeed_compression.{transport}"
            assert outcome["compressed"] >= STEPS // 3
            losses = outcome["losses"]
            assert len(set(losses)) > STEPS / 2
            assert losses[-1] < losses[0] - 0.4
            assert sum(losses[-4:]) / 4 < plain * 1.1
        assert one["optimizers"]["Adam"]["compressed"] == 0


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_are_those_of_deepspeeds_own_transport(trained: Trained, name: str) -> None:
    for own, ours in zip(trained("replaced-own"), trained("replaced"), strict=True):
        assert own["optimizers"][name]["transport"] == "deepspeed.runtime.comm.compressed.CompressedBackend"
        assert own["optimizers"][name]["compressed"] == 0
        # A sign may differ where a sum is as good as 0.
        assert ours["optimizers"][name]["losses"] == pytest.approx(own["optimizers"][name]["losses"], rel=1e-3)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_losses_in_shared_memory_are_those_on_gloo(trained: Trained, name: str) -> None:
    for on_gloo, on_ccl in zip(trained("replaced"), trained("replaced-ccl"), strict=True):
        expected = on_gloo["optimizers"][name]["losses"]
        assert on_ccl["optimizers"][name]["losses"] == pytest.approx(expected, rel=1e-3)


# --- ZeRO++


def check_zero_plus_plus(found: list[dict[str, Any]]) -> None:
    for one in found:
        plain = one["ZeRO-3"]
        assert plain["int4 calls"] == 0
        for name, outcome in one.items():
            assert outcome["losses"][-1] < outcome["losses"][0] - 1
            assert outcome["losses"] == pytest.approx(plain["losses"], rel=0.01)
            assert (outcome["losses"] != plain["losses"]) == (name != "ZeRO-3")
            assert (outcome["int4 calls"] > 0) == (name in ("int4 gradients", "both"))
            fewer = 3.8 if name in ("int8 weights", "both") else 1
            assert outcome["gathered bytes"] <= plain["gathered bytes"] / fewer


def test_zero_plus_plus_trains_on_cpus(tmp_path: Path) -> None:
    check_zero_plus_plus(on_two_ranks(tmp_path, "zeropp_training.py", "replaced", env={"LOCAL_SIZE": "1"}))


NAMES = """
import comm_orchestrator.deepspeed
comm_orchestrator.deepspeed.replace_comm()
from deepspeed.runtime.comm import coalesced_collectives as ours
from deepspeed.runtime.zero import stage3
assert stage3.all_to_all_quant_reduce is ours.all_to_all_quant_reduce
assert stage3.reduce_scatter_coalesced is comm_orchestrator.reduce_scatter_coalesced
assert stage3.CUDAQuantizer.__module__ == "comm_orchestrator.facade.deepspeed_compression"
assert ours.all_to_all_loco_quant_reduce.__module__.startswith("deepspeed.")  # its own, as before
try:
    from deepspeed.runtime.comm.nccl import my_gather
except ImportError as error:
    print(error)
try:
    ours_nccl = __import__("deepspeed.runtime.comm.nccl", fromlist=["x"]).cupy
except AttributeError as error:
    print(error)
"""


def test_which_names_are_replaced() -> None:
    *_, first, second = run("-c", NAMES).splitlines()
    assert "cannot import name 'my_gather'" in first
    assert second.startswith("deepspeed.runtime.comm.nccl, which comm_orchestrator has replaced, has no 'cupy'")


# --- a release without 1-bit optimizers

WITHOUT = """
import importlib, json
import comm_orchestrator as ours
from comm_orchestrator import deepspeed as replacement
replacement.replace_comm()
import deepspeed, torch
assert deepspeed.comm.all_reduce.__wrapped__ is ours.all_reduce
found = {"version": deepspeed.__version__}
for name in (*replacement.COMPRESSED, *replacement.AMENDED, *replacement.KEPT):
    try:
        importlib.import_module(name)
        found[name] = "is there"
    except ModuleNotFoundError as error:
        found[name] = str(error)
deepspeed.init_distributed("gloo", verbose=False)
for stage in range(3):
    model = torch.nn.Linear(4, 4)
    config = {"train_batch_size": 1, "zero_optimization": {"stage": stage}, "zero_allow_untested_optimizer": True,
              "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    engine = deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]
    before = [float(one.sum()) for one in model.parameters()]
    engine.backward(engine(torch.ones(1, 4)).square().sum())
    engine.step()
    assert before != [float(one.sum()) for one in model.parameters()], stage
    engine.destroy()
ours.destroy_process_group()
print(json.dumps(found))
"""


@pytest.mark.skipif(not NEWEST, reason="nox -s ecosystem installs a newer DeepSpeed and names its folder")
def test_a_release_without_these_modules_loads_and_trains(tmp_path: Path) -> None:
    env = {"PYTHONPATH": NEWEST, "LOCAL_SIZE": "1"}
    found = json.loads(run("-c", WITHOUT, env=env).splitlines()[-1])
    assert tuple(int(part) for part in found.pop("version").split(".")[:3]) >= (0, 19, 8)
    for name in ("nccl", "mpi", "hccl", "compressed"):
        whole = f"deepspeed.runtime.comm.{name}"
        assert found.pop(whole) == f"No module named {whole!r}"
    assert set(found.values()) == {"is there"}
    check_zero_plus_plus(on_two_ranks(tmp_path, "zeropp_training.py", "replaced", env=env))
