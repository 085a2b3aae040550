"""Ways into Megatron: script runner, flags, Bridge, CPU runtime, and the table of patches.

``integration/patching`` (patches, configuration in force) lies below all that Megatron calls; the
rest lies above the optimizer.
"""
