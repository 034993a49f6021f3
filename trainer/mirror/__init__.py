"""A copy of a run in a store, from which it goes on where its folder is gone."""
