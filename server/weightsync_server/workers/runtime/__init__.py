"""Processes that the server starts: spawned, greeted, watched, replaced when lost, ended.

They inherit one end of a socket pair and nothing else, and its end is their death: none outlives
the server. Light to import, because the children begin here as well.
"""
