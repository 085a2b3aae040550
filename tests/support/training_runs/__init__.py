"""Training runs in processes of their own, and stand-ins for them."""
