"""Converts checkpoints between expert layouts and file formats, and compares them."""
