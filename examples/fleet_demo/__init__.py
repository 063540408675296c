"""A fleet on this machine that takes each version together. Run `python -m examples.fleet_demo`."""
