"""Which keys of the key-value cache a request may read: those of its present version, or its own.

`cache_key` has the names under which keys are found.
"""
