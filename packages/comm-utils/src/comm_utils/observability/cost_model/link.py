"""A network as two numbers."""

from __future__ import annotations

import re
from dataclasses import dataclass

from comm_utils.errors import ArgumentError

__all__ = ["Link", "parse_link"]


@dataclass(frozen=True)
class Link:
    """A network link between hosts.

    Attributes:
        latency_us: of a message on its way from one host to another, beyond what the software of both ends costs.
        beta_us_per_byte: of all bytes that leave a host, and of all that enter it: one over the bandwidth.
    """

    latency_us: float
    beta_us_per_byte: float

    @property
    def bandwidth_gb_per_s(self) -> float:
        """Each way, in 10^9 bytes per second."""
        return 1e-3 / self.beta_us_per_byte

    def __str__(self) -> str:
        return f"{self.latency_us:g} µs, {self.bandwidth_gb_per_s * 8:g} Gbit/s"


_TIMES = {"ns": 1e-3, "us": 1.0, "µs": 1.0, "ms": 1e3, "s": 1e6}
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+)\s*(ns|us|µs|ms|s)", re.IGNORECASE)
_BANDWIDTH = re.compile(r"(\d+\.?\d*|\.\d+)\s*([kmgt]?)(bits?|bytes?|b)(?:/s|ps)?")


def parse_link(text: str, name: str = "--network") -> Link:
    """``5us,100Gbit`` or ``2us,12.5GB/s``: latency, and bandwidth each way in bits or (capital B) bytes per second.

    Raises:
        ArgumentError: it is anything else.
    """
    latency, comma, bandwidth = text.partition(",")
    # "GB/s" are bytes; "Gb/s" and "Gbit" are bits.
    unit = re.sub(r"B(?=$|/|ps)", "bytes", bandwidth.strip()).lower()
    first, second = _LATENCY.fullmatch(latency.strip()), _BANDWIDTH.fullmatch(unit)
    if not comma or first is None or second is None or float(second[1]) == 0:
        raise ArgumentError(
            f"{name}: got {text!r}; expected a latency and a bandwidth above zero with their units, such as "
            "5us,100Gbit or 2us,12.5GB/s"
        )
    bytes_per_s = float(second[1]) * _PREFIXES[second[2]] / (1 if second[3].startswith("byte") else 8)
    return Link(float(first[1]) * _TIMES[first[2].lower()], 1e6 / bytes_per_s)
