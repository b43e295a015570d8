"""The gateway's knowledge of its workers: heartbeats, health, and which of them are ready for a model."""
