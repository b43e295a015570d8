"""The worker processes that the gateway starts, watches and stops."""
