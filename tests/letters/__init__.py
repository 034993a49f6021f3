"""A third task, as somebody would add it: a folder of its own, and one line in the table."""
