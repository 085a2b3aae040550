"""Python runs this when it starts, where this folder is on its path: for what a test starts."""

import engine_calls

engine_calls.replace()
