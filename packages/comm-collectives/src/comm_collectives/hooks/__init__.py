"""Hooks that communicate while a model trains: data-parallel, sharded, model-parallel and pipeline building blocks."""
