"""How long a fleet takes to be live on a new version."""
