"""Version of this package; single source."""

VERSION = "0.16.0"
