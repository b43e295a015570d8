"""The engines, and the modules that connect a worker to them. Another package's engine uses `ichat.engines.engine`."""
