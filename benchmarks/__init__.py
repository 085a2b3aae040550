"""What the documents quote, measured beside stock.

From a checkout: ``python -m benchmarks --help``. Not part of the wheel.
"""
