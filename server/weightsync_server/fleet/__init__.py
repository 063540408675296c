"""One decision for many hosts: a plan, a key that is created once, members that obey it.

`applies/<n>/plan` says what is to become live where, `applies/<n>/decisions/<k>` what was decided,
both created once in a `Register`. Whoever creates a decision first has decided; nobody's clock,
lease or silence decides anything.
"""
