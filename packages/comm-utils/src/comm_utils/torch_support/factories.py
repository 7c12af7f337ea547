"""torch's factory functions as torch defines them.

``deepspeed.zero.Init`` replaces the functions of the module ``torch`` while a model is built. Its replacements return
floating-point tensors of the model's dtype and on the model's device, whatever a call asks for. A temporary of a
collective has to have the dtype and the size that the collective counts on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import arange, empty, eye, full, ones, randn, tensor, zeros
else:
    _defined = torch._C._VariableFunctions
    arange, empty, eye, full = _defined.arange, _defined.empty, _defined.eye, _defined.full
    ones, randn, tensor, zeros = _defined.ones, _defined.randn, _defined.tensor, _defined.zeros

__all__ = ["arange", "empty", "eye", "full", "ones", "randn", "tensor", "zeros"]
