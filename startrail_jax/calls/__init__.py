"""What a call of the op must be: its inputs, how they are sharded, and what is refused."""
