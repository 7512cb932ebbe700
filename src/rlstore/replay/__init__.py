"""Off-policy storages: transitions kept until they are overwritten, and drawn at random."""
