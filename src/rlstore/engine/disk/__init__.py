"""What lies on disk: snapshots, mapped folders, episodes."""
