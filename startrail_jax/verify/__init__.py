"""Verifies the op on the devices at hand: `python -m startrail_jax.verify`."""
