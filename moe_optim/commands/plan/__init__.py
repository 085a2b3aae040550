"""Figures, tables and picture of ``moe-optim plan``."""
