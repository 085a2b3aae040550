"""Version of this package; single source."""

VERSION = "0.15.0"
