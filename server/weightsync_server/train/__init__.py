"""Training beside serving: the trainer that the server supervises, and its jobs.

Light to import, for the settings are.
"""
