"""Device side of requantization: the member table, and the kernels that read it."""
