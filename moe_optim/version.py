"""Version of this package; single source."""

VERSION = "0.13.0"
