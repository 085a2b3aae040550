"""Version of this package; single source."""

VERSION = "0.12.0"
