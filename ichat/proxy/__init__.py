"""The way of a request through the gateway."""
