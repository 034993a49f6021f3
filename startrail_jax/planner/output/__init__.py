"""What a plan prints besides its table."""
