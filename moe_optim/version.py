"""Version of this package; single source."""

VERSION = "0.9.0"
