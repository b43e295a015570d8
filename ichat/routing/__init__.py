"""The decisions: which workers there are and which one gets a request. Nothing here waits."""
