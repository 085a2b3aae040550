"""Version of this package; single source."""

VERSION = "0.10.0"
