"""A Slurm cluster of two nodes on one machine: the real daemons, each node on a host of its own."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers import hosts
from launchers.hosts import Host
from launchers.launcher import Launcher
from launchers.mpi import Mpi
from launchers.processes import Command, background, run

TOOLS = ("munged", "slurmctld", "slurmd", "srun", "salloc", "sinfo")
PACKAGES = "slurmctld slurmd slurm-client munge"
MUNGE_FILES = {"key-file": "munge.key", "socket": "munge.socket", "pid-file": "munged.pid", "seed-file": "munge.seed"}
CPUS = 4

# Slurm takes the declared processors for real, which two cores then share. Neither control groups nor an accounting
# daemon are needed.
CONFIGURATION = """
ClusterName=comm
SlurmctldHost={first.name}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/{socket}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
TmpFS={folder}/tmp-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
SwitchType=switch/none
MpiDefault=none
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MailProg=/bin/true
ReturnToService=2
KillWait=2
UnkillableStepTimeout=5
NodeName={first.name} NodeAddr={first.address} CPUs={cpus} State=UNKNOWN
NodeName={second.name} NodeAddr={second.address} CPUs={cpus} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=10 State=UP OverSubscribe=FORCE:4
"""

# Whatever a machine has, this kind does nothing where nothing asks for limits; the automatic choice needs the real one.
CGROUP_CONFIGURATION = "CgroupPlugin=cgroup/v1\n"


@dataclass(frozen=True)
class Cluster:
    nodes: tuple[Host, Host]
    folder: Path

    @property
    def configuration(self) -> Path:
        return self.folder / "slurm.conf"

    def command(self, arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> Command:
        """``arguments``, for example srun's, as a command on the first node."""
        return self.nodes[0].command(arguments, {"SLURM_CONF": str(self.configuration), **(environment or {})})

    def srun(self, *options: str) -> Launcher:
        """srun over both nodes, evenly where that is possible."""

        def commands(program: Sequence[str], ranks: int) -> list[Command]:
            # Unless told so, Slurm puts 3 and 1 where 2 and 2 would do.
            evenly = [f"--ntasks-per-node={ranks // 2}"] if ranks % 2 == 0 else []
            return [self.command(["srun", "-N2", f"-n{ranks}", *evenly, *options, *program])]

        return Launcher("srun", commands)

    def missing(self, plugin: str) -> str:
        """Why ``srun --mpi=plugin`` can't be used here, or nothing."""
        (tried,) = run([self.command(["srun", "-N2", "-n2", f"--mpi={plugin}", "true"])], deadline_s=30)
        # It is in Debian's package, and needs the one more that has libpmix.so as a link.
        return "" if tried.returncode == 0 else f"no srun --mpi={plugin}: apt-get install libpmix-dev\n{tried.stderr}"

    def mpirun(self, mpi: Mpi) -> Launcher:
        """mpirun inside an allocation of both nodes, which it reaches through srun."""

        def commands(program: Sequence[str], ranks: int) -> list[Command]:
            inner = mpi.command(program, ranks)
            return [self.command(["salloc", "-N2", f"-n{ranks}", *inner.arguments], inner.environment)]

        return Launcher(f"mpirun of {mpi.name} in an allocation", commands)

    def logs(self) -> str:
        """The last lines of every daemon."""
        tails = [(path, path.read_text(errors="replace").splitlines()[-15:]) for path in self.folder.glob("*.log")]
        return "\n".join("\n".join((f"--- {path.name}", *lines)) for path, lines in sorted(tails))


def missing() -> str:
    """Why there can be no cluster here, or nothing."""
    if reason := hosts.missing():
        return reason
    lacking = [tool for tool in TOOLS if not shutil.which(tool, path=_path())]
    return f"Slurm needs {', '.join(lacking)}: apt-get install {PACKAGES}" if lacking else ""


@contextlib.contextmanager
def two_nodes(start_s: float = 30) -> Iterator[Cluster]:
    """A cluster of node01 and node02, both idle; all that belongs to it is gone in the end."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="slurm-", ignore_cleanup_errors=True)))
        nodes = stack.enter_context(hosts.two_hosts("node01", "node02"))
        cluster = Cluster(nodes, folder)
        _write_files(cluster)
        start = stack.enter_context(background())

        def daemon(node: Host, *arguments: str) -> None:
            log = folder / f"{arguments[0]}-{node.name}.log"
            start(node.command(arguments, {"PATH": _path()}), log)

        # Forced, as the folder is private, while munge wants everybody to reach its socket.
        options = [f"--{option}={folder / name}" for option, name in MUNGE_FILES.items()]
        daemon(nodes[0], "munged", "--foreground", "--force", *options)
        _wait_until(lambda: (folder / MUNGE_FILES["socket"]).exists(), start_s, cluster)
        daemon(nodes[0], "slurmctld", "-D", "-f", str(cluster.configuration))
        for node in nodes:
            daemon(node, "slurmd", "-D", "-N", node.name, "-f", str(cluster.configuration))
        sinfo = cluster.command(["sinfo", "--noheader", "--Node", "--format=%T"])
        _wait_until(lambda: run([sinfo], start_s)[0].stdout.split() == ["idle", "idle"], start_s, cluster)
        yield cluster


def _write_files(cluster: Cluster) -> None:
    first, second = cluster.nodes
    folder = cluster.folder
    for name in ("state", *(f"tmp-{node.name}" for node in cluster.nodes)):
        (folder / name).mkdir()
    key = folder / MUNGE_FILES["key-file"]
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    values = {"first": first, "second": second, "folder": folder, "cpus": CPUS, "socket": MUNGE_FILES["socket"]}
    cluster.configuration.write_text(CONFIGURATION.format(**values))
    (folder / "cgroup.conf").write_text(CGROUP_CONFIGURATION)


def _path() -> str:
    # Daemons are in folders that are in the PATH of root only, and not always.
    return os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/sbin", "/sbin"))


def _wait_until(ready: Callable[[], bool], patience_s: float, cluster: Cluster) -> None:
    end_s = time.monotonic() + patience_s
    while not ready():
        if time.monotonic() > end_s:
            raise RuntimeError(f"Slurm did not start within {patience_s} s\n{cluster.logs()}")
        time.sleep(0.1)
