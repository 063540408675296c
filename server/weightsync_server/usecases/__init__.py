"""What the server does for callers: functions of its parts, an admitted caller and a request.

gRPC, HTTP and the ingest processes are three doors to them. Light to import: what a process needs
of it is imported from its module.
"""
