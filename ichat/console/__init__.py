"""The console: the page that operators see at `/console/`, a client of the control plane in their browser."""
