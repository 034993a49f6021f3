"""Recipes: functions that return a `TrainConfig`, which flags then override."""

from configs import dit, gpt

RECIPES = gpt.RECIPES | dit.RECIPES
"""By name, as `train.py` takes them."""
