"""Rollouts that actors in other processes write and learners read."""
