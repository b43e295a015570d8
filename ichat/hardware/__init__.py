"""What a machine has: GPUs, processors, memory."""
