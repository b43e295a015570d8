"""Metrics, traces, the access log and the workers' logs."""
