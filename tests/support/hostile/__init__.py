"""Damaged and malicious files."""
