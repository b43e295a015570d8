"""The operator's commands, a client of the control plane."""
