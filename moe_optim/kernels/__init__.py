"""Triton kernels and the tables that they read: requantize, step, norm, finish, cast, health.

Offers ``MemberTable``, ``StepTable`` and what ``moe_optim.ops`` launches. Knows formats, neither
Megatron nor process groups.
"""
