"""This host as a member of a fleet: its engines obey what the fleet's register says.

`LocalHost` is what a `FleetMember` drives; `FleetService` makes both of a server's settings.
"""
