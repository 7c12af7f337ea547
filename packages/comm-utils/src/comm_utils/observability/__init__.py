"""What is recorded of communication, and what is made of it: logger, traces, exports, cost model."""
