"""Models from a hub: downloaded by a process of an engine's environment, found on this machine's disk, and removed."""
