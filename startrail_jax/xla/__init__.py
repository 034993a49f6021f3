"""What XLA must be told: options, order, which devices hold what, and what has no derivative."""
