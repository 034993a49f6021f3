"""Programs that collect the metrics of many runs."""
