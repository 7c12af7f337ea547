"""Records of communication and what is made of them: logger, traces, exports, cost model."""
