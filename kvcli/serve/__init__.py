"""`kv serve`: a model behind the HTTP interfaces that other programs speak.

A worker thread has the engine and its scheduler; everything else runs in one event loop. `worker` knows no HTTP, `app`
no interface: each interface is a file that turns JSON into a `Question` and the events of its answers into JSON.
"""
