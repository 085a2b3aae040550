"""Files, plots, provenance and progress bars, shared by the commands."""
