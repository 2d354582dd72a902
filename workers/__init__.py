"""The worker process: paged pool, step loop, model and sampling of one device.

May import ``workers.core``, ``kvstore.client``, ``kvstore.core``, ``kernels``, ``text`` and
``proto``. It owns block ids and token values; it never decides another request's fate.
"""
