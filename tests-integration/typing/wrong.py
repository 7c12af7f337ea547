"""Mistakes that mypy finds before the program runs; each line says what it reports there."""

from __future__ import annotations

import torch

import comm_orchestrator as dist

tensor = torch.ones(4)
dist.al_reduce(tensor)  # Module has no attribute "al_reduce"
dist.all_reduce(tensor, gruop=None)  # Unexpected keyword argument "gruop"
dist.all_reduce("tensor")  # incompatible type "str"; expected "Tensor"
dist.broadcast(tensor, "0")  # incompatible type "str"; expected "int | None"
dist.all_reduce(tensor, timeout="5")  # incompatible type "str"; expected "float | timedelta | None"
rank: str = dist.get_rank()  # Incompatible types in assignment
dist.no_such_function()  # Module has no attribute "no_such_function"
