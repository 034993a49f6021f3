"""Recipes: functions that return a `TrainConfig`. Flags override its settings."""

from configs import dit, gpt, wan

RECIPES = gpt.RECIPES | dit.RECIPES | wan.RECIPES
"""All recipes by name: the first word of the command line of train.py."""
