"""What the operator wrote: its schema, how it is read, and how a mistake in it is told."""
