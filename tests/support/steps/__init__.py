"""Oracles and inputs of optimizer steps."""
