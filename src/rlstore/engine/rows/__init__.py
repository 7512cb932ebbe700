"""What a row is, and where it lies."""
