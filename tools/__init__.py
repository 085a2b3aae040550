"""Maintainer tools: measurements, generated documents, checks. Not in the wheel."""
