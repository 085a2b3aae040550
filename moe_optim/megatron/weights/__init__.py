"""Which parameters are managed, and what they are called."""
