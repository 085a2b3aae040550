"""Expert layers, their amaxes, and what serves them."""
