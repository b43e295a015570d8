"""The hardware of a machine: GPUs, processors, memory."""
