"""Steps of data-parallel and sharded training on two ranks; see docs/training.md."""
