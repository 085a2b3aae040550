"""The life cycle of buckets, and the sequences of calls that test it."""
