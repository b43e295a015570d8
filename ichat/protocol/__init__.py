"""The messages between the gateway and its workers."""
