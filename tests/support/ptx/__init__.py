"""PTX, the code that Triton compiles kernels to, run on a CPU: for GPUs that are not at hand."""
