"""Can this worker start? Everything that would keep it from starting, and the system's facts about that."""
