"""The network section: variables of NCCL, gloo, oneCCL and libfabric under typed keys.

A key is the variable's name in lower case without the library's prefix (``NCCL_DEBUG`` is ``network.nccl.debug``);
libfabric's, which oneCCL reads, keep theirs (``FI_PROVIDER`` is ``network.ccl.fi_provider``). ``None`` means that
the variable is not set. Meanings and ranges follow NVIDIA's, PyTorch's, oneCCL's and libfabric's documentation.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field

from comm_config.fields import Positive, Section, Text, lower_case, not_a_flag, upper_case
from comm_config.library import InterfaceName, LibraryConfig, variable_text

__all__ = ["CclConfig", "GlooConfig", "NcclConfig", "NetworkConfig"]

# The numbers are the older spelling; NCCL reads both.
_Distance = Annotated[
    Literal["LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS", "0", "1", "2", "3", "4", "5"],
    BeforeValidator(upper_case),
    BeforeValidator(variable_text),
]


class NcclConfig(LibraryConfig):
    """Variables of NCCL (and of RCCL, which reads the same names)."""

    prefixes: ClassVar[tuple[str, ...]] = ("NCCL_", "TORCH_NCCL_")

    debug: Annotated[Literal["VERSION", "WARN", "INFO", "ABORT", "TRACE"], BeforeValidator(upper_case)] | None = Field(
        default=None, description="NCCL_DEBUG: what NCCL logs."
    )
    debug_file: Text | None = Field(
        default=None, description="NCCL_DEBUG_FILE: file for the log; %h is replaced by the host, %p by the pid."
    )
    debug_subsys: Text | None = Field(
        default=None, description="NCCL_DEBUG_SUBSYS: subsystems to log, such as 'INIT,NET', or '^NET' to leave out."
    )
    socket_ifname: Text | None = Field(
        default=None,
        description="NCCL_SOCKET_IFNAME: interface prefixes, such as 'ib0,eth'; '=eth0' exactly, '^lo,docker' all but.",
    )
    socket_family: Annotated[Literal["AF_INET", "AF_INET6"], BeforeValidator(upper_case)] | None = Field(
        default=None, description="NCCL_SOCKET_FAMILY: IPv4 or IPv6 only."
    )
    socket_nthreads: Annotated[int, Field(ge=1, le=16), not_a_flag] | None = Field(
        default=None, description="NCCL_SOCKET_NTHREADS: threads per network connection."
    )
    nsocks_perthread: Positive | None = Field(
        default=None, description="NCCL_NSOCKS_PERTHREAD: sockets opened by each of those threads."
    )
    net: Text | None = Field(default=None, description="NCCL_NET: network module, such as 'IB' or 'Socket'.")
    net_plugin: Text | None = Field(default=None, description="NCCL_NET_PLUGIN: network plugin to load, or 'none'.")
    net_gdr_level: _Distance | None = Field(
        default=None, description="NCCL_NET_GDR_LEVEL: largest distance of GPU and NIC for GPUDirect RDMA (LOC to SYS)."
    )
    ib_disable: bool | None = Field(default=None, description="NCCL_IB_DISABLE: use IP sockets instead of InfiniBand.")
    ib_hca: Text | None = Field(
        default=None, description="NCCL_IB_HCA: host channel adapters, such as 'mlx5_0:1,mlx5_1:1', or '^mlx5_3'."
    )
    ib_timeout: Annotated[int, Field(ge=0, le=31), not_a_flag] | None = Field(
        default=None, description="NCCL_IB_TIMEOUT: InfiniBand timeout t, standing for 4.096 µs * 2^t."
    )
    ib_retry_cnt: Annotated[int, Field(ge=0, le=7), not_a_flag] | None = Field(
        default=None, description="NCCL_IB_RETRY_CNT: InfiniBand retry count."
    )
    ib_gid_index: Annotated[int, Field(ge=-1), not_a_flag] | None = Field(
        default=None, description="NCCL_IB_GID_INDEX: global identifier index for RoCE; -1 chooses it."
    )
    ib_sl: Annotated[int, Field(ge=0, le=15), not_a_flag] | None = Field(
        default=None, description="NCCL_IB_SL: InfiniBand service level."
    )
    ib_tc: Annotated[int, Field(ge=0, le=255), not_a_flag] | None = Field(
        default=None, description="NCCL_IB_TC: InfiniBand traffic class."
    )
    ib_qps_per_connection: Annotated[int, Field(ge=1, le=128), not_a_flag] | None = Field(
        default=None, description="NCCL_IB_QPS_PER_CONNECTION: queue pairs per connection."
    )
    p2p_disable: bool | None = Field(
        default=None, description="NCCL_P2P_DISABLE: no direct access between GPUs (NVLink or PCI)."
    )
    p2p_level: _Distance | None = Field(
        default=None, description="NCCL_P2P_LEVEL: largest distance of two GPUs for direct access (LOC to SYS)."
    )
    shm_disable: bool | None = Field(
        default=None, description="NCCL_SHM_DISABLE: no shared memory between processes of one host."
    )
    cumem_enable: bool | None = Field(
        default=None, description="NCCL_CUMEM_ENABLE: allocate through CUDA's virtual memory interface."
    )
    nvls_enable: bool | None = Field(default=None, description="NCCL_NVLS_ENABLE: NVLink SHARP.")
    algo: Text | None = Field(
        default=None, description="NCCL_ALGO: algorithms, such as 'Tree', 'Ring,Tree', '^Ring' or 'allreduce:tree'."
    )
    proto: Text | None = Field(default=None, description="NCCL_PROTO: protocols, such as 'Simple' or 'LL,LL128'.")
    buffsize: Positive | None = Field(
        default=None, description="NCCL_BUFFSIZE: buffer between a pair of GPUs, in bytes."
    )
    nthreads: Annotated[int, Field(ge=32, multiple_of=32), not_a_flag] | None = Field(
        default=None, description="NCCL_NTHREADS: CUDA threads per block: 64, 128, 256 or 512."
    )
    min_nchannels: Positive | None = Field(default=None, description="NCCL_MIN_NCHANNELS: fewest channels.")
    max_nchannels: Positive | None = Field(default=None, description="NCCL_MAX_NCHANNELS: most channels.")
    cross_nic: Annotated[int, Field(ge=0, le=2), not_a_flag] | None = Field(
        default=None, description="NCCL_CROSS_NIC: rings across NICs: 0 never, 1 always, 2 as found best."
    )
    ignore_cpu_affinity: bool | None = Field(
        default=None, description="NCCL_IGNORE_CPU_AFFINITY: place threads by the GPU only, not by the job's affinity."
    )
    topo_file: Text | None = Field(default=None, description="NCCL_TOPO_FILE: XML file with the topology to assume.")
    topo_dump_file: Text | None = Field(
        default=None, description="NCCL_TOPO_DUMP_FILE: file to write the detected topology to."
    )
    launch_mode: Annotated[Literal["PARALLEL", "GROUP"], BeforeValidator(upper_case)] | None = Field(
        default=None, description="NCCL_LAUNCH_MODE: how kernels of several GPUs in one process are launched."
    )


class GlooConfig(LibraryConfig):
    """Variables of gloo, as PyTorch reads them."""

    prefixes: ClassVar[tuple[str, ...]] = ("GLOO_", "TORCH_GLOO_")

    socket_ifname: Text | None = Field(
        default=None, description="GLOO_SOCKET_IFNAME: exact interface names, comma-separated."
    )
    device_transport: Annotated[Literal["TCP", "TCP_TLS", "UV", "IBVERBS"], BeforeValidator(upper_case)] | None = Field(
        default=None, description="GLOO_DEVICE_TRANSPORT: transport; what there is depends on the build of PyTorch."
    )


class CclConfig(LibraryConfig):
    """Variables of oneCCL, and of libfabric below it."""

    prefixes: ClassVar[tuple[str, ...]] = ("CCL_", "FI_")

    worker_count: Positive | None = Field(default=None, description="CCL_WORKER_COUNT: worker threads per rank.")
    worker_offload: bool | None = Field(
        default=None, description="CCL_WORKER_OFFLOAD: progress in worker threads; off, in calls that wait and test."
    )
    worker_affinity: Text | None = Field(
        default=None, description="CCL_WORKER_AFFINITY: 'auto', or the core of each worker, such as '3,4,5'."
    )
    worker_mem_affinity: Text | None = Field(
        default=None, description="CCL_WORKER_MEM_AFFINITY: 'auto', or the NUMA node of each worker."
    )
    atl_transport: Annotated[Literal["mpi", "ofi"], BeforeValidator(lower_case)] | None = Field(
        default=None, description="CCL_ATL_TRANSPORT: MPI, or OFI (libfabric)."
    )
    shared_memory: bool | None = Field(
        default=None,
        description="CCL_SHARED_MEMORY: ranks of one host share memory; off, they use oneCCL. Not oneCCL's own.",
    )
    shared_memory_transfer: (
        Annotated[Literal["cached", "streamed", "single_copy"], BeforeValidator(lower_case)] | None
    ) = Field(
        default=None,
        description="CCL_SHARED_MEMORY_TRANSFER: the only way of moving data in shared memory. Not oneCCL's own.",
    )
    shared_memory_learning: bool | None = Field(
        default=None,
        description="CCL_SHARED_MEMORY_LEARNING: groups measure which way is the fastest. Not oneCCL's own.",
    )
    shared_memory_profile: Text | None = Field(
        default=None,
        description="CCL_SHARED_MEMORY_PROFILE: file of the host's measurements; 0 is none. Not oneCCL's own.",
    )
    kernels: Annotated[Literal["avx512", "avx2", "neon", "portable"], BeforeValidator(lower_case)] | None = Field(
        default=None,
        description="CCL_KERNELS: instructions for reductions in shared memory. Not oneCCL's own.",
    )
    atl_shm: bool | None = Field(
        default=None, description="CCL_ATL_SHM: libfabric's shared memory between ranks of one host."
    )
    kvs_mode: Annotated[Literal["pmi", "mpi"], BeforeValidator(lower_case)] | None = Field(
        default=None, description="CCL_KVS_MODE: how ranks find each other."
    )
    kvs_iface: Text | None = Field(
        default=None, description="CCL_KVS_IFACE: interface of the key-value store that ranks meet at."
    )
    log_level: Annotated[Literal["error", "warn", "info", "debug", "trace"], BeforeValidator(lower_case)] | None = (
        Field(default=None, description="CCL_LOG_LEVEL: what oneCCL logs.")
    )
    process_launcher: Annotated[Literal["hydra", "torchrun", "pmix", "none"], BeforeValidator(lower_case)] | None = (
        Field(default=None, description="CCL_PROCESS_LAUNCHER: who tells oneCCL its local rank.")
    )
    priority: Annotated[Literal["direct", "lifo", "none"], BeforeValidator(lower_case)] | None = Field(
        default=None, description="CCL_PRIORITY: order of outstanding operations."
    )
    mnic: Annotated[Literal["global", "local", "none"], BeforeValidator(lower_case)] | None = Field(
        default=None, description="CCL_MNIC: which NICs of the host to use."
    )
    mnic_name: Text | None = Field(default=None, description="CCL_MNIC_NAME: NIC names or prefixes; '^' leaves out.")
    mnic_count: Positive | None = Field(default=None, description="CCL_MNIC_COUNT: most NICs to use.")
    allgatherv: Text | None = Field(default=None, description="CCL_ALLGATHERV: algorithm of all_gather.")
    allreduce: Text | None = Field(
        default=None,
        description="CCL_ALLREDUCE: algorithm, such as 'ring', or by bytes: 'recursive_doubling:0-8192;ring:8193-max'.",
    )
    alltoall: Text | None = Field(default=None, description="CCL_ALLTOALL: algorithm of all_to_all.")
    alltoallv: Text | None = Field(default=None, description="CCL_ALLTOALLV: algorithm of uneven all_to_all.")
    barrier: Text | None = Field(default=None, description="CCL_BARRIER: algorithm of barrier.")
    bcast: Text | None = Field(default=None, description="CCL_BCAST: algorithm of broadcast.")
    reduce: Text | None = Field(default=None, description="CCL_REDUCE: algorithm of reduce.")
    reduce_scatter: Text | None = Field(default=None, description="CCL_REDUCE_SCATTER: algorithm of reduce_scatter.")
    fi_provider: Text | None = Field(
        default=None, description="FI_PROVIDER: libfabric provider, such as 'tcp', 'shm', 'verbs' or 'psm3'."
    )
    fi_tcp_iface: Text | None = Field(default=None, description="FI_TCP_IFACE: interface of libfabric's tcp provider.")

    @classmethod
    def variable_of(cls, key: str) -> str:
        """Return the variable that ``key`` stands for."""
        return key.upper() if key.startswith("fi_") else super().variable_of(key)


class NetworkConfig(Section):
    """Interfaces, and the variables of NCCL, gloo and oneCCL. A variable that the environment holds wins."""

    interface: InterfaceName | None = Field(
        default=None,
        description="Network interface for gloo, NCCL and oneCCL, unless the section of a library names another.",
    )
    nccl: NcclConfig = Field(default_factory=NcclConfig, description="Variables of NCCL.")
    gloo: GlooConfig = Field(default_factory=GlooConfig, description="Variables of gloo.")
    ccl: CclConfig = Field(default_factory=CclConfig, description="Variables of oneCCL and libfabric.")
