"""What processes of one machine have in common: peers, slots, lanes, limits."""
