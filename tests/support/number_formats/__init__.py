"""Weights, values and meshes that test the formats."""
