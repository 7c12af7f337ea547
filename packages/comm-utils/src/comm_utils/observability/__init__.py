"""Observability: logger, traces, exports, cost model."""
