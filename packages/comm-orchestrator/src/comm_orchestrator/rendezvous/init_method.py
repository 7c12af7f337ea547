"""Parse ``init_method``, whose forms are those of ``torch.distributed``."""

from __future__ import annotations

from urllib.parse import SplitResult, parse_qsl, urlsplit

from comm_utils.errors import ArgumentError, LaunchError

__all__ = ["parsed", "without_arguments"]

_OWN_SCHEMES = ("env", "file", "tcp")


def parsed(init_method: str) -> tuple[SplitResult, int | None]:
    """Return the parts of a URL, and its port.

    Raises:
        LaunchError: it is none.
    """
    try:
        url = urlsplit(init_method)
        return url, url.port
    except ValueError as error:
        raise LaunchError(
            f"init_distributed: init_method: got {init_method!r} ({error}); expected tcp://host:port, file:///path or "
            "env://"
        ) from error


def without_arguments(init_method: str | None, rank: int, world_size: int) -> tuple[str | None, int, int]:
    """Return the URL without ``?rank=0&world_size=2``, and both numbers.

    Args:
        rank, world_size: the arguments beside it; -1 is none.

    Raises:
        LaunchError: it is no URL, or its query has other names.
        ArgumentError: a number is none, or given twice.
    """
    if not isinstance(init_method, str) or "?" not in init_method:
        return init_method, rank, world_size
    url, _ = parsed(init_method)
    if url.scheme not in _OWN_SCHEMES:
        return init_method, rank, world_size
    found = {"rank": rank, "world_size": world_size}
    for name, value in parse_qsl(url.query, keep_blank_values=True):
        if name not in found:
            raise LaunchError(
                f"init_distributed: init_method: got {init_method!r}, with {name!r}; only rank and world_size can "
                "follow the question mark"
            )
        if found[name] != -1:
            raise ArgumentError(
                f"init_distributed: {name}: got {found[name]}, and {value} in init_method; give it once"
            )
        if not value.isdecimal():
            raise ArgumentError(f"init_distributed: init_method: got {name}={value!r}; expected a number")
        found[name] = int(value)
    return init_method.partition("?")[0], found["rank"], found["world_size"]
