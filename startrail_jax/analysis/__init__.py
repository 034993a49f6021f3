"""Readers of compiled programs: bytes that they send, and between which devices. Nothing of the op
imports them."""
