"""Version of this package; single source."""

VERSION = "0.8.0"
