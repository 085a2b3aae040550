"""Integration with Megatron: flags, script runner, dry run, Bridge, CPU runtime, patch table.

``script_runner`` reads the plug-in's flags (``arguments``), a dry run reports all refusals
(``preflight``, ``first_iteration``), ``installation`` applies ``patches`` through ``engine``. These
three are below all code that Megatron calls; the others are above the optimizer.
"""
