"""Places below the KV pool for the blocks of prefixes: found by content, checked when read, never waited for.

A block leaves the pool when room is needed and dies with its server. A tier keeps a copy of it: in host memory, in a
directory on disk, or in a store that several servers share. `tier.Tier` is what such a place can do, `record.py` the
form in which a block lies there, `keys.py` its name. `store.py` is what an engine uses.
"""
