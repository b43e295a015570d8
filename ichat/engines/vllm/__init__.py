"""vLLM in the worker's own process."""
