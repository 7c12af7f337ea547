"""``commctl doctor``: what there is, what is wrong with it, and what to do about it.

Each check is a module with functions that return :class:`~comm_orchestrator.tools.doctor.finding.Finding` objects;
``local`` runs those of one rank, and ``command`` on one rank or on all ranks of a job together.
"""

__all__: list[str] = []
