"""Version of this package; single source."""

VERSION = "0.11.0"
