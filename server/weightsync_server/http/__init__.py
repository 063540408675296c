"""The door for HTTP: metrics and health, and calls that come as HTTP."""
