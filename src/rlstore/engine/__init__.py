"""The engine under every storage: schema, ring, select, gather, returns, segments."""
