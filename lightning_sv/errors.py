"""Errors that the command line reports in one sentence. Any other exception is a bug, and shows its traceback."""


class ConfigError(ValueError):
    """Report what a user got wrong: `KEY is VALUE; expected EXPECTED. HINT`; the command line exits with 2."""


class NotTestableError(ConfigError):
    """Report that the given runs cannot answer a question, and why; a claim's verdict becomes "not testable here"."""


class RunError(RuntimeError):
    """Report that a run or a program that it starts has failed; the command line exits with 1."""
