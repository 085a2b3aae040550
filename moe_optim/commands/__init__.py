"""The ``moe-optim`` command: train, run, plan, doctor, inspect, verify, convert, export, report.

Nothing outside this folder imports it, and training loads none of it.
"""
