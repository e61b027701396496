"""The Lightning side: module, data, checkpoints, command line of `fit`."""
