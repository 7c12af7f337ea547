"""Mistakes that mypy finds before the program runs; each line says what it reports there."""

from __future__ import annotations

import torch

import comm_orchestrator as dist

tensor = torch.ones(4)
dist.al_reduce(tensor)  # Module has no attribute "al_reduce"; maybe "all_reduce"
dist.all_reduce(tensor, gruop=None)  # Unexpected keyword argument "gruop" for "all_reduce"
dist.all_reduce("tensor")  # Argument 1 to "all_reduce" has incompatible type "str"; expected "Tensor"
dist.broadcast(tensor, "0")  # Argument 2 to "broadcast" has incompatible type "str"
dist.all_gather(tensor, tensor)  # Argument 1 to "all_gather" has incompatible type "Tensor"
dist.all_reduce(tensor, timeout="5")  # Argument "timeout" to "all_reduce" has incompatible type "str"
rank: str = dist.get_rank()  # Incompatible types in assignment
dist.no_such_function()  # Module has no attribute "no_such_function"
