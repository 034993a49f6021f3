"""Who meets whom, in which round, and how it travels: the schedule, and what runs it."""
