"""Processes that the server starts: spawned, greeted, watched, replaced when lost, ended.

They inherit one end of a socket pair and nothing else, and end when the other end closes: none
outlives the server. Light to import, as the children begin here, too.
"""
