"""Version of this package; single source."""

VERSION = "0.1.0"
