"""Imported by Python at startup if this folder is on its path; used for subprocesses of tests."""

import engine_calls

engine_calls.replace()
