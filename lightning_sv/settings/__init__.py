"""Settings of a run, from YAML and the command line; without Lightning, so that plans and reports start fast."""
