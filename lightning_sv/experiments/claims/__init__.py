"""Claims about a panel, and the tests that decide them."""
