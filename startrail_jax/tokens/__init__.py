"""Where each token of the sequence lives, and how users bring tokens there."""
