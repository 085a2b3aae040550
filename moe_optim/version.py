"""Version of this package; single source."""

VERSION = "0.17.0"
