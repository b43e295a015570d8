"""The decisions: which workers there are and which worker gets a request. Nothing here waits."""
