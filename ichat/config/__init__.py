"""The operator's configuration: its schema, how it is read, and how its mistakes are reported."""
