"""Names of experts in state dicts, and conversion between them. Pure."""
