"""Distributed communication for PyTorch: one call to set it up anywhere, one API to use it.

import comm_orchestrator as dist

dist.init_distributed()
dist.all_reduce(tensor)

Public names that are not here but in ``torch.distributed`` are handed on as they are. The first use of a name imports
the façade and torch; ``commctl`` reads files and prints its help without them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # What __getattr__ passes on of torch.distributed, name by name: type checkers that saw a __getattr__ would accept
    # any name, misspelt ones too. The façade has the others under its own names.
    from torch.distributed import BackendConfig as BackendConfig
    from torch.distributed import DebugLevel as DebugLevel
    from torch.distributed import DeviceMesh as DeviceMesh
    from torch.distributed import DistBackendError as DistBackendError
    from torch.distributed import DistError as DistError
    from torch.distributed import DistNetworkError as DistNetworkError
    from torch.distributed import DistStoreError as DistStoreError
    from torch.distributed import get_debug_level as get_debug_level
    from torch.distributed import get_node_local_rank as get_node_local_rank
    from torch.distributed import get_pg_count as get_pg_count
    from torch.distributed import is_backend_available as is_backend_available
    from torch.distributed import is_gloo_available as is_gloo_available
    from torch.distributed import is_mpi_available as is_mpi_available
    from torch.distributed import is_nccl_available as is_nccl_available
    from torch.distributed import is_torchelastic_launched as is_torchelastic_launched
    from torch.distributed import is_ucc_available as is_ucc_available
    from torch.distributed import is_xccl_available as is_xccl_available
    from torch.distributed import register_rendezvous_handler as register_rendezvous_handler
    from torch.distributed import rendezvous as rendezvous
    from torch.distributed import set_debug_level as set_debug_level
    from torch.distributed import set_debug_level_from_env as set_debug_level_from_env
    from torch.distributed import supports_complex as supports_complex

    from comm_orchestrator.facade import *  # noqa: F403
    from comm_orchestrator.facade import __all__ as __all__
else:
    import importlib
    import importlib.util
    import sys

    # Private names of torch.distributed that programs use.
    _INSTEAD = {
        "_all_gather_base": "all_gather_into_tensor()",
        "_coalescing_manager": "coalescing()",
        "_reduce_scatter_base": "reduce_scatter_tensor()",
    }

    def _take_names(facade: dict[str, Any]) -> None:
        """Make the façade's names this module's own, so that later uses find them without a call; it calls this."""
        names = {name: facade[name] for name in facade["__all__"]}
        # The import of the façade has set this name to the package of that name, which would hide torch's function.
        names["rendezvous"] = sys.modules["torch.distributed"].rendezvous
        kept = {name: value for name, value in globals().items() if name != "rendezvous"}  # a program may have set some
        globals().update({**names, "__all__": facade["__all__"], **kept})

    def __getattr__(name: str) -> Any:
        if name.startswith("__") and name != "__all__":  # asked for by the import system, and by tools
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if "__all__" not in globals():
            if name != "rendezvous" and importlib.util.find_spec(f"{__name__}.{name}") is not None:
                return importlib.import_module(f"{__name__}.{name}")
            importlib.import_module(f"{__name__}.facade")
            if name in globals():
                return globals()[name]
        return _of_torch(name)

    def __dir__() -> list[str]:
        importlib.import_module(f"{__name__}.facade")
        return sorted(globals())

    def _of_torch(name: str) -> Any:
        c10d = sys.modules["torch.distributed"]
        if not name.startswith("_") and hasattr(c10d, name):
            return getattr(c10d, name)
        reason = ", and torch.distributed has none"
        if name.startswith("_"):
            reason = ""
            if hasattr(c10d, name):
                own = _INSTEAD.get(name)
                reason = f": private names of torch.distributed are not handed on; use {own + ' or ' if own else ''}"
                reason += f"torch.distributed.{name}"
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{reason}")
