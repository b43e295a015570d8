"""The control plane: its routes, their description, and the reload."""
