"""The folder of a run: settings, checkpoints, metrics; how a program ends."""
