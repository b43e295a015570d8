"""One request through the gateway."""
