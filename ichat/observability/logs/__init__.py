"""The output of workers: captured, kept, followed."""
