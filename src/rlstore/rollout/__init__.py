"""On-policy storages: rollouts that are written, turned into targets and batches, and overwritten."""
