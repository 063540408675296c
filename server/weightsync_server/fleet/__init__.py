"""One decision for many hosts: a plan, a key that is created once, members that obey it.

Whoever creates `applies/<n>/decisions/<k>` first has decided; nobody's clock, lease or silence
decides anything.
"""
