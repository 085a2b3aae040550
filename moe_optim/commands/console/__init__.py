"""Shared by the commands: files, pictures, provenance and progress."""
