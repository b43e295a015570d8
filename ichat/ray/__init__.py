"""Ray, as its dashboard shows it: a client of the HTTP API, without any package of Ray's."""
