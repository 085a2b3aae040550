"""Numbers and tables of ``moe-optim plan``."""
