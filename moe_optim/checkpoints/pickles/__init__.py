"""Pickles and archives as plain data, without running them."""
