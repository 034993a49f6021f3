"""Readers of compiled programs: what they send, and to whom. Nothing of the op imports them."""
