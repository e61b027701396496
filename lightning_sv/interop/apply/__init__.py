"""Strategies on existing models, as parametrizations of their weights."""
