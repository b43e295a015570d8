"""SGLang in the worker's own process."""
