"""Environment variables that matter here, and those that are left over from a hunt for an error."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from comm_config.secret import SECRET_VARIABLE
from comm_orchestrator.tools.doctor.finding import Finding

__all__ = ["check", "relevant"]

_PREFIXES = (
    "CCL_",
    "COMM_",
    "DEEPSPEED_",
    "FI_",
    "GLOO_",
    "GROUP_",
    "I_MPI_",
    "LOCAL_",
    "MASTER_",
    "MPI_LOCAL",
    "NCCL_",
    "OMPI_COMM_",
    "PMIX_RANK",
    "PMI_",
    "TORCHELASTIC_",
    "TORCH_DISTRIBUTED_",
    "TORCH_GLOO_",
    "TORCH_NCCL_",
)
_NAMES = (
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "RANK",
    "SLURM_JOB_ID",
    "SLURM_NTASKS",
    "SLURM_PROCID",
    "WORLD_SIZE",
    "ZE_AFFINITY_MASK",
)
# variable -> the values that only a hunt for an error wants, and what they cost
_DEBUGGING = {
    "TORCH_DISTRIBUTED_DEBUG": (
        ("DETAIL",),
        "checks every collective with two more, and hangs unless all ranks have it",
    ),
    "CUDA_LAUNCH_BLOCKING": (("1",), "lets nothing run beside a kernel, communication included"),
    "NCCL_P2P_DISABLE": (("1",), "sends between the GPUs of a host through its memory"),
    "NCCL_SHM_DISABLE": (("1",), "sends between the GPUs of a host through its network"),
    "NCCL_IB_DISABLE": (("1",), "leaves InfiniBand unused"),
    "NCCL_DEBUG": (("INFO", "TRACE"), "prints at every start, and more"),
    "FI_PROVIDER": (("sockets",), "is a provider that libfabric has given up; tcp is faster"),
}


def relevant(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that launchers, libraries and these packages read, secrets hidden."""
    return {
        name: "(hidden)" if name == SECRET_VARIABLE else environ[name]
        for name in sorted(environ)
        if name in _NAMES or name.startswith(_PREFIXES)
    }


def check(environ: Mapping[str, str], warnings: Iterable[str]) -> list[Finding]:
    """Variables that nobody reads, or that slow everything down.

    Args:
        warnings: what reading the configuration logged.
    """
    findings = [
        Finding("warning", "variables", text, "correct its name, or unset it if no other program reads it")
        for text in dict.fromkeys(warnings)
    ]
    for name, (values, cost) in _DEBUGGING.items():
        value = environ.get(name, "")
        if value.upper() in values or value in values:
            findings.append(
                Finding("warning", "variables", f"{name}={value} {cost}", f"unset {name} unless you need it")
            )
    return findings or [Finding("ok", "variables", "nothing is set that contradicts or slows down")]
