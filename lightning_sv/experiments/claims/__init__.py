"""What can be claimed of a panel, and what decides each claim."""
