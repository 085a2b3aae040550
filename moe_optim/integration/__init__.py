"""Ways into Megatron: flags, script runner and dry run, Bridge, CPU runtime, the table of patches.

A run: ``script_runner`` reads the plug-in's flags (``arguments``), a dry run lists what would be
refused (``preflight``, ``first_iteration``), ``installation`` applies ``patches`` by ``engine``.
``engine``, ``patches`` and ``installation`` lie below all that Megatron calls; the rest lies above
the optimizer.
"""
