"""Checks a run before it trains, on its own devices: `train.py --verify`."""
