"""Which keys of the key-value cache a request may read: those of its present version, or its own.

`cache_key` names a version's keys; `core_keys` hashes by that name in vLLM's EngineCore;
`core_hooks` puts it there and is called from the API process; `admission` does what can be done
from that process alone, for a vLLM without the hooks.
"""
