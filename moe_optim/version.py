"""Version of this package; single source."""

VERSION = "0.6.0"
