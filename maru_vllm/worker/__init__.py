"""The worker half: maps the pool and copies. No socket, no key, no index.

half           the facade that vLLM's worker hooks call
jobs           which jobs run, who waits for them, and reporting each exactly once (pure)
copy_runner    where copies run: threads here, a script in the simulation
device_order   what a copy waits for on a device
mapping        the mapped pool, and the session lock that keeps its space ours
caches         the registered cache tensors
loads, stores  what one job does
"""
