"""What lies where in flat optimizer states."""
