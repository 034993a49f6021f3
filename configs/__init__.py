"""Recipes: functions that return a `TrainConfig`."""
