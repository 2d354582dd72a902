"""The Python SDK: ``Client`` and ``AsyncClient``, one implementation.

``core/`` decides when to reconnect and what has been received; the modules beside it talk gRPC.
Nothing here may import another part of DeepInfer except ``proto`` and the shared vocabulary in
``kvstore.core``.
"""
