"""Version of this package; single source."""

VERSION = "0.14.0"
