"""The fault matrix: what every rank gets when one of them fails, on every backend. ``nox -s faults`` runs it."""
