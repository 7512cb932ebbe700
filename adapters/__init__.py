"""Programs of other libraries with our storages in the place of theirs: that they run, and how well they learn."""
