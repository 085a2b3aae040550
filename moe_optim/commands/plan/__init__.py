"""Numbers, tables and plot of ``moe-optim plan``."""
