"""Files and batches, whatever they hold."""
