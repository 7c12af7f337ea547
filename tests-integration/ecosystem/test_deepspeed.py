"""DeepSpeed itself on this API: ``deepspeed.comm`` replaced, and nothing else changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import comm_orchestrator as dist
from comm_orchestrator.deepspeed import COMPRESSED, GONE, KEPT, REPLACED

_HERE = str(Path(__file__).parent)
if _HERE not in sys.path:
    sys.path.insert(0, _HERE)

from deepspeed_processes import EXTENSIONS, launcher, run  # noqa: E402

pytest.importorskip("deepspeed", reason="DeepSpeed is installed by nox -s ecosystem only", exc_type=ImportError)

HERE = Path(__file__).parent
TOOLS = HERE.parents[1] / "tools"
STAGES = ("0", "1", "2", "3")

Trained = Callable[[str], list[dict[str, Any]]]


# DeepSpeed's operator opens its peers' shared memory by name without waiting until they have made it, and hangs when
# one had not: its own training is started again.
STOCK_ATTEMPTS = 3
COMPILE = "from deepspeed.ops.op_builder import ShareMemCommBuilder as B; B().load(verbose=False)"


def train_with_stock(*command: str) -> None:
    for lock in EXTENSIONS.glob("**/lock"):
        # What compiled there was killed; torch would wait for it without end.
        lock.unlink()
    run("-c", COMPILE, timeout_s=280)
    for attempt in range(1, STOCK_ATTEMPTS + 1):
        try:
            run(*command, timeout_s=60)
        except subprocess.TimeoutExpired:
            if attempt == STOCK_ATTEMPTS:
                raise
        else:
            return


def train_on(ranks: int, kind: str, out: Path, *stages: str) -> list[dict[str, Any]]:
    """Train on so many ranks, and return what each one wrote down."""
    command = (*launcher(ranks), str(HERE / "deepspeed_training.py"), kind, str(out), *stages)
    if kind == "stock":
        train_with_stock(*command)
    else:
        run(*command)
    return [json.loads(Path(out, f"rank{rank}.json").read_text()) for rank in range(ranks)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """What all ranks wrote down, with DeepSpeed as it is and with its communication replaced."""
    found: dict[str, list[dict[str, Any]]] = {}

    def train(kind: str) -> list[dict[str, Any]]:
        if kind not in found:
            out = tmp_path_factory.mktemp(kind)
            found[kind] = train_on(2, kind, out)
        return found[kind]

    return train


def test_whose_functions_were_called(trained: Trained) -> None:
    assert [one["module"] for one in trained("stock")] == ["deepspeed.comm.comm"] * 2
    assert [one["module"] for one in trained("replaced")] == ["comm_collectives.collectives"] * 2


@pytest.mark.parametrize("stage", STAGES)
def test_every_loss_is_the_same_to_the_last_bit(trained: Trained, stage: str) -> None:
    for stock, replaced in zip(trained("stock"), trained("replaced"), strict=True):
        assert len(set(stock["stages"][stage]["losses"])) == 6
        assert replaced["stages"][stage]["losses"] == stock["stages"][stage]["losses"]


@pytest.mark.parametrize("stage", STAGES)
def test_training_goes_on_from_a_checkpoint(trained: Trained, stage: str) -> None:
    for one in trained("replaced"):
        assert one["stages"][stage]["resumed"] == one["stages"][stage]["losses"][3:]


@pytest.mark.parametrize("stage", STAGES)
def test_losses_on_oneccl_are_those_on_gloo(trained: Trained, stage: str) -> None:
    if not dist.available_backends()["ccl"].usable:
        pytest.skip(dist.available_backends()["ccl"].reason)
    for on_gloo, on_ccl in zip(trained("replaced"), trained("replaced-ccl"), strict=True):
        assert (on_gloo["backend"], on_ccl["backend"]) == ("gloo", "ccl")
        for kind in ("losses", "resumed"):
            expected = [float.fromhex(one) for one in on_gloo["stages"][stage][kind]]
            found = [float.fromhex(one) for one in on_ccl["stages"][stage][kind]]
            assert found == pytest.approx(expected, rel=1e-5)


def test_zero_3_on_three_ranks(tmp_path: Path) -> None:
    """On three, lists are padded and parts have different sizes; the additions have another order than DeepSpeed's."""
    found = {}
    for kind in ("stock", "replaced"):
        out = tmp_path / kind
        out.mkdir()
        found[kind] = [one["stages"]["3"] for one in train_on(3, kind, out, "3")]
    for stock, replaced in zip(found["stock"], found["replaced"], strict=True):
        expected, losses = ([float.fromhex(one) for one in of["losses"]] for of in (stock, replaced))
        assert losses == pytest.approx(expected, rel=1e-5)
        assert replaced["resumed"] == replaced["losses"][3:]


def test_ranks_saw_different_data_and_learned(trained: Trained) -> None:
    first, second = trained("replaced")
    for stage in STAGES:
        losses = [float.fromhex(one) for one in first["stages"][stage]["losses"]]
        assert losses[-1] < losses[0]
        assert first["stages"][stage]["losses"] != second["stages"][stage]["losses"]


SUBMODULES = """
import importlib.util, json
import comm_orchestrator as ours
from comm_orchestrator import deepspeed as replacement
replacement.replace_comm()
replacement.replace_comm()
import deepspeed
import deepspeed.comm as one
from deepspeed import comm as two
from deepspeed.comm.comm import all_reduce
from deepspeed.comm.reduce_op import ReduceOp
assert one is two is deepspeed.comm
assert deepspeed.comm.all_reduce is all_reduce
assert all_reduce.__wrapped__ is ours.all_reduce  # with handles that wait in order
assert deepspeed.comm.all_gather.__wrapped__.__wrapped__ is ours.all_gather
assert deepspeed.comm.get_rank is ours.get_rank
assert ReduceOp is ours.ReduceOp is deepspeed.comm.ReduceOp
assert deepspeed.init_distributed is deepspeed.comm.init_distributed
assert deepspeed.init_distributed.__wrapped__ is ours.init_distributed
found = {}
assert importlib.util.find_spec("deepspeed.comm.torch") is not None
for name in (*replacement.REPLACED, *replacement.KEPT, *replacement.GONE, *replacement.COMPRESSED):
    try:
        found[name] = str(importlib.import_module(name).__spec__.origin)
    except ImportError as error:
        found[name] = f"{type(error).__name__}: {error}"
for name in (
    "cdb", "comms_logger", "CommsLogger", "timers", "timed_op",
    "NCCL_BACKEND", "get_msg_size_from_args", "TORCH_DISTRIBUTED_DEFAULT_PORT",
):
    try:
        getattr(deepspeed.comm.comm, name)
    except AttributeError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


def test_which_submodules_are_replaced() -> None:
    found = json.loads(run("-c", SUBMODULES).splitlines()[-1])
    for name in ("deepspeed.comm", "deepspeed.comm.comm", "deepspeed.comm.reduce_op"):
        assert "comm_orchestrator" in found[name]
    for name, ours in COMPRESSED.items():
        assert found[name].endswith("deepspeed_compression.py"), ours
    for name in ("config", "constants", "utils"):
        assert found[f"deepspeed.comm.{name}"].endswith(os.path.join("deepspeed", "comm", f"{name}.py"))
    for name in ("backend", "ccl", "mori", "torch"):
        assert found[f"deepspeed.comm.{name}"].startswith(
            f"ModuleNotFoundError: deepspeed.comm.{name} is not there: comm_orchestrator.deepspeed.replace_comm() has "
        )
    missing = "deepspeed.comm.comm, which comm_orchestrator has replaced, has no"
    assert found["timed_op"] == f"{missing} 'timed_op': names inside of DeepSpeed's own implementation are not provided"
    assert found["cdb"] == (
        f"{missing} 'cdb': is_initialized() says whether there is a world, and init_distributed() keeps one that is "
        "there"
    )
    for name, source in (
        ("NCCL_BACKEND", "deepspeed.comm.constants"),
        ("get_msg_size_from_args", "deepspeed.comm.utils"),
        ("TORCH_DISTRIBUTED_DEFAULT_PORT", "deepspeed.constants"),
    ):
        assert found[name] == f"{missing} {name!r}: import it from {source}, which stays DeepSpeed's own"
    for name in ("comms_logger", "CommsLogger"):
        assert found[name] == (
            f"{missing} {name!r}: configure() turns the comms logger on and off, and log_rows() returns what it "
            "recorded"
        )
    assert found["timers"].startswith(f"{missing} 'timers': log_rows() has the durations")


def test_no_submodule_is_forgotten() -> None:
    script = "import pkgutil, deepspeed.comm as c; print(*(m.name for m in pkgutil.iter_modules(c.__path__)))"
    ours = {name.rpartition(".")[2] for name in (*REPLACED[1:], *KEPT, *GONE)}
    assert set(run("-c", script).splitlines()[-1].split()) <= ours


def test_no_transport_of_1_bit_optimizers_is_forgotten() -> None:
    script = "import pkgutil, deepspeed.runtime.comm as c; print(*(m.name for m in pkgutil.iter_modules(c.__path__)))"
    found = set(run("-c", script).splitlines()[-1].split()) - {"coalesced_collectives", "utils"}
    assert found <= {name.rpartition(".")[2] for name in COMPRESSED}


def test_too_late() -> None:
    script = (
        "import deepspeed, comm_orchestrator.deepspeed as r\ntry: r.replace_comm()\nexcept RuntimeError as e: print(e)"
    )
    assert "call replace_comm() before the first import of deepspeed" in run("-c", script).splitlines()[-1]


COMMS_LOGGER = """
import comm_orchestrator.deepspeed
comm_orchestrator.deepspeed.replace_comm()
import deepspeed, torch
from deepspeed import comm as dist
deepspeed.init_distributed("gloo", verbose=False)
config = {"train_batch_size": 1, "comms_logger": {"enabled": True, "prof_all": True}, "steps_per_print": 10**9}
model = torch.nn.Linear(2, 2)
deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), 0.1), config=config)
dist.reset_log()
dist.all_reduce(torch.ones(4), log_name="mine")
assert dist.get_logged_comm_ops() == ["mine"], dist.get_logged_comm_ops()
assert dist.log_summary(return_dict=True)["summary"]["mine"][16]["count"] == 1
dist.destroy_process_group()
"""


def test_deepspeeds_configuration_turns_the_comms_logger_on() -> None:
    assert "mine" in run("-c", COMMS_LOGGER)


OTHERS = """
import inspect, json, sys
from deepspeed import comm
recorded = json.load(open(sys.argv[1]))["names"]
names = [name for name in dir(comm) if not name.startswith("_") and not inspect.ismodule(getattr(comm, name))]
print(*(name for name in names if name not in recorded))
"""


def test_only_what_deepspeed_imports_itself_is_left_out_of_the_recorded_api() -> None:
    found = run("-c", OTHERS, str(TOOLS / "deepspeed_comm.json")).splitlines()[-1].split()
    assert found == ["Any", "Enum", "Optional", "get_accelerator", "timedelta"]


def test_the_recorded_api_is_that_of_the_installed_release() -> None:
    recorded = json.loads((TOOLS / "deepspeed_comm.json").read_text())
    text = run(str(TOOLS / "deepspeed_api.py"))
    assert json.loads(text[text.index("{") :]) == recorded, (
        "run python tools/deepspeed_api.py > tools/deepspeed_comm.json"
    )
