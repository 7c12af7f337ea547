"""Ranks of these tests are forked from a process that has imported what all of them import."""

import os

from hypothesis import HealthCheck, settings

from comm_utils.testing import preload

# Groups neither measure the host nor start from what others found.
os.environ.setdefault("CCL_SHARED_MEMORY_PROFILE", "0")

preload("torch.distributed.tensor", "pytest", "hypothesis")

# A busy machine is no reason to fail; `--hypothesis-profile=thorough` tries ten times as many examples.
settings.register_profile("usual", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
settings.load_profile("usual")
