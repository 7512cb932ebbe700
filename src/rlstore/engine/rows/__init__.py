"""The fields of a row, and its place in memory."""
