"""A takeover: a new process gets a gateway from the old process, while requests wait and streams go on."""
