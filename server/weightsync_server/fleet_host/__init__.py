"""This host as a member of a fleet: its engines obey what the fleet's register says.

`FleetHost` is what a `FleetMember` drives; `start_fleet` makes both of a server's settings.
"""
