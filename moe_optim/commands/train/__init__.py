"""Trains a GPT from a recipe: dataset, ranks and results."""
