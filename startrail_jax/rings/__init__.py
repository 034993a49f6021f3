"""The ring schedule and the loop that runs it."""
