"""Everything on disk: snapshots, mapped files and episodes, each in a folder with a manifest."""
