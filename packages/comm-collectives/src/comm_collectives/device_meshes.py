"""Device meshes of torch, whose groups get the timeout of the world."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import distributed_c10d as internals

from comm_collectives import arguments
from comm_collectives.keyword_errors import with_keyword_errors
from comm_utils.errors import ArgumentError, ArgumentTypeError
from comm_utils.given import shown
from comm_utils.process_locks import ProcessLock

__all__ = ["init_device_mesh", "initialize_mesh_device"]


@with_keyword_errors
def init_device_mesh(
    device_type: str,
    mesh_shape: tuple[int, ...],
    *,
    mesh_dim_names: tuple[str, ...] | None = None,
    **options: Any,
) -> Any:
    """Return a ``DeviceMesh`` over all ranks; its groups get the timeout given to ``init_distributed``.

    Args:
        device_type: ``"cpu"``, ``"cuda"`` or ``"xpu"``.
        mesh_shape: ranks along every dimension of the mesh; their product is the world size.
        mesh_dim_names: a name for each dimension.
        options: passed to ``torch.distributed.device_mesh.init_device_mesh``.

    Raises:
        CommError: as for :func:`new_group`.
    """
    from torch.distributed import device_mesh  # at the first use: it imports much that most programs never need

    backend = arguments.active("init_device_mesh")
    size = backend.get_world_size(None)
    if not isinstance(mesh_shape, (tuple, list)) or not all(_is_size(n) for n in mesh_shape):
        raise ArgumentTypeError(
            f"init_device_mesh: mesh_shape: got {shown(mesh_shape)}; expected a tuple of positive integers"
        )
    _check_dim_names(mesh_dim_names, len(mesh_shape))
    if device_type not in backend.device_types(None):
        raise ArgumentError(
            f"init_device_mesh: device_type: got {shown(device_type)}; backend {backend.get_backend(None)!r} serves "
            f"{' and '.join(backend.device_types(None))}"
        )
    if torch.Size(mesh_shape).numel() != size:
        raise ArgumentError(
            f"init_device_mesh: mesh_shape: got {tuple(mesh_shape)}, which is {torch.Size(mesh_shape).numel()} ranks; "
            f"expected a product of {size}, the world size"
        )
    timeout = backend.get_timeout()
    with _default_timeout(timeout):
        mesh = device_mesh.init_device_mesh(device_type, tuple(mesh_shape), mesh_dim_names=mesh_dim_names, **options)
    if timeout is not None:
        for group in mesh.get_all_groups():
            internals._set_pg_timeout(timeout, group)
    return mesh


def _is_size(n: object) -> bool:
    return isinstance(n, int) and not isinstance(n, bool) and n > 0


def _check_dim_names(names: Any, dimensions: int) -> None:
    if names is None:
        return
    if not isinstance(names, (tuple, list)) or not all(isinstance(name, str) for name in names):
        raise ArgumentTypeError(
            f"init_device_mesh: mesh_dim_names: got {shown(names)}; expected a tuple of {dimensions} strings"
        )
    if len(names) != dimensions or len(set(names)) != dimensions:
        raise ArgumentError(
            f"init_device_mesh: mesh_dim_names: got {shown(names)}; expected {dimensions} different strings, one for "
            "each dimension of mesh_shape"
        )


_patching = ProcessLock(threading.Lock)


@contextmanager
def _default_timeout(timeout: timedelta | None) -> Iterator[None]:
    """Give ``timeout`` to groups that torch creates in the block; gloo of torch 2.6 accepts no later change."""
    with _patching.lock:
        original = internals._get_default_timeout
        if timeout is not None:
            internals._get_default_timeout = lambda backend: timeout
        try:
            yield
        finally:
            internals._get_default_timeout = original


def initialize_mesh_device(mesh_shape: tuple[int, ...], mesh_dim_names: tuple[str, ...]) -> Any:
    """Return :func:`init_device_mesh` on the accelerator where the world group serves one; DeepSpeed's name of it.

    Args:
        mesh_shape, mesh_dim_names: as for :func:`init_device_mesh`.

    Raises:
        ArgumentError, ArgumentTypeError: as for :func:`init_device_mesh`.
        NotInitializedError: nothing is initialised, or the group was destroyed.
    """
    accelerators = [
        device for device in arguments.active("initialize_mesh_device").device_types(None) if device != "cpu"
    ]
    available = [device for device in accelerators if getattr(torch, device).is_available()] if accelerators else []
    return init_device_mesh(available[0] if available else "cpu", mesh_shape, mesh_dim_names=mesh_dim_names)
