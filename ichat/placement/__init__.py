"""How much memory a model needs on GPUs: pure functions of its config.json, the headers of its files, and flags."""
