"""Codes of narrow numbers: values to codes and back, in plain torch."""
