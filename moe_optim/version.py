"""Version of this package; single source."""

VERSION = "0.7.0"
