"""The command `bench`: it measures a model under load, as the model's clients see it."""
