"""How many examples Hypothesis tries. Few tests here have ranks, so that a server to fork them from does not pay."""

from hypothesis import HealthCheck, settings

# A busy machine is no reason to fail; `--hypothesis-profile=thorough` tries ten times as many examples.
settings.register_profile("usual", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("thorough", settings.get_profile("usual"), max_examples=1000)
settings.load_profile("usual")
