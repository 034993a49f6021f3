"""What a plan is made for: read from files, or measured on the devices at hand."""
