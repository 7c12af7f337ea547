"""Hugging Face Accelerate beside our layer, in one process and in either order. Skipped where it is not installed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as c10d

from comm_utils.testing import run_ranks
from comm_utils.torch_support.gloo_workers import wait_until_idle

pytest.importorskip("accelerate", reason="Hugging Face Accelerate is not installed")

ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "ACCELERATE_USE_CPU": "true", "ACCELERATE_TORCH_DEVICE": None}
SAMPLES = 22


def trained(folder: str, use_ours: Callable[[], None]) -> dict[str, Any]:
    """A short training, and what each of Accelerate's collectives gave. ``use_ours`` is called between its calls."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    use_ours()
    torch.manual_seed(3)
    model: Any = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    inputs = torch.randn(SAMPLES, 5)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(1, keepdim=True), torch.arange(SAMPLES))
    loader: Any = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    def epoch() -> list[float]:
        losses = []
        for batch, wanted, _ in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(batch), wanted)
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()).mean().item())
            use_ours()
        return losses

    found: dict[str, Any] = {"kind": str(accelerator.distributed_type), "wrapped": type(model).__name__}
    found["losses"] = epoch()
    accelerator.save_state(folder)
    accelerator.wait_for_everyone()
    found["more"] = epoch()
    use_ours()
    accelerator.load_state(folder)
    found["again"] = epoch()
    found["seen"] = [index for *_, part in loader for index in accelerator.gather_for_metrics(part).tolist()]
    own = torch.tensor([accelerator.process_index + 1.0])
    found["reduced"] = [accelerator.reduce(own, kind).item() for kind in ("sum", "mean")]
    from accelerate.utils import broadcast, broadcast_object_list, gather_object

    found["broadcast"] = broadcast(own.clone(), from_process=1).item()
    found["objects"] = gather_object([{"rank": accelerator.process_index}])
    found["object"] = broadcast_object_list([accelerator.process_index], from_process=1)
    use_ours()
    return found


def nothing() -> None:
    pass


def check_ours() -> None:
    import comm_orchestrator as dist

    dist.init_distributed(verbose=False)
    rank = dist.get_rank()
    tensor = torch.tensor([rank + 1.0])
    dist.all_reduce(tensor, "avg")
    assert tensor.item() == 1.5
    assert dist.allgather_object(rank) == [0, 1]
    assert dist.get_world_size() == c10d.get_world_size()


def run_plain(folder: str) -> dict[str, Any]:
    found = trained(folder, nothing)
    c10d.destroy_process_group()
    wait_until_idle()  # gloo's own would abort the process now and then
    return found


def run_ours_first(folder: str) -> dict[str, Any]:
    import comm_orchestrator as dist

    dist.init_distributed("gloo", verbose=False)
    found = trained(folder, check_ours)
    dist.barrier()
    dist.destroy_process_group()
    assert not c10d.is_initialized()
    return found


def run_accelerate_first(folder: str) -> dict[str, Any]:
    found = trained(folder, check_ours)
    import comm_orchestrator as dist

    dist.barrier()
    c10d.destroy_process_group()
    assert not dist.is_initialized()
    return found


def run_on_ccl(folder: str) -> dict[str, Any]:
    """As docs/migrating.md says it."""
    import comm_orchestrator as dist

    dist.init_distributed("ccl", verbose=False)
    found = trained(folder, check_ours)
    assert dist.get_backend() == c10d.get_backend() == "ccl"
    dist.barrier()
    dist.destroy_process_group()
    return found


def ask_accelerate_for_ccl() -> tuple[str, str]:
    """What Accelerate does by itself where it is asked for ccl on the CPU."""
    from accelerate import Accelerator, InitProcessGroupKwargs

    import comm_backend_ccl  # noqa: F401  # torch.distributed has "ccl" from here on

    try:
        accelerator = Accelerator(cpu=True, kwargs_handlers=[InitProcessGroupKwargs(backend="ccl")])
    except Exception as error:
        return "error", f"{type(error).__name__}: {error}"
    found = str(accelerator.distributed_type), c10d.get_backend()
    c10d.destroy_process_group()
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run_ranks(run_plain, 2, str(tmp_path_factory.mktemp("plain")), timeout_s=120, env=ENVIRONMENT)


def test_without_us(plain: list[dict[str, Any]]) -> None:
    for found in plain:
        assert found["wrapped"] == "DistributedDataParallel"
        assert found["kind"].endswith("MULTI_CPU")
        assert found["losses"][-1] < found["losses"][0]
        assert found["again"] == found["more"]
        assert found["again"] != found["losses"]
        assert sorted(found["seen"]) == list(range(SAMPLES))
        assert found["reduced"] == [3.0, 1.5]
        assert found["broadcast"] == 2.0
        assert found["objects"] == [{"rank": 0}, {"rank": 1}]
        assert found["object"] == [1]


@pytest.mark.parametrize("target", [run_ours_first, run_accelerate_first])
def test_with_us(plain: list[dict[str, Any]], target: Callable[[str], Any], tmp_path: Path) -> None:
    assert run_ranks(target, 2, str(tmp_path), timeout_s=120, env=ENVIRONMENT) == plain


def is_near(found: Any, expected: Any) -> bool:
    """Whether two results are equal but for rounding: ranks are added in another order."""
    if isinstance(expected, float):
        return found == pytest.approx(expected, rel=1e-4, abs=1e-6)
    if isinstance(expected, dict):
        return found.keys() == expected.keys() and all(is_near(found[key], expected[key]) for key in expected)
    if isinstance(expected, list):
        return len(found) == len(expected) and all(map(is_near, found, expected))
    return bool(found == expected)


def test_on_ccl_that_was_initialised_before(plain: list[dict[str, Any]], tmp_path: Path) -> None:
    found = run_ranks(run_on_ccl, 2, str(tmp_path), timeout_s=120, env=ENVIRONMENT)
    assert is_near(found, plain), (found, plain)


def test_accelerate_alone_does_not_start_ccl() -> None:
    """The reason for the order on the page; if this fails, Accelerate has learned it, and the page can say so."""
    for kind, backend in run_ranks(ask_accelerate_for_ccl, 2, timeout_s=120, env=ENVIRONMENT):
        assert kind == "error", (kind, backend)
