"""The settings of a run, as YAML and command line give them: what it trains, what it reads, the trainer's keys.

Without Lightning, so that what plans and compares runs starts quickly.
"""
