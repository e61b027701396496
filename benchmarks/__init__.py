"""Timings of ours against the peers, side by side."""
