"""A run as its command line says it, and its directory: everything that needs no Lightning, and so starts quickly."""
