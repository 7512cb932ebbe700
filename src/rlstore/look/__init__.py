"""A look inside: what `rlstore inspect` and `storage.to_html()` show of a storage or of a folder."""
