"""Linear attention over a sequence that is sharded over devices: states are passed, not tokens."""
