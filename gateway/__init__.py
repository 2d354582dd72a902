"""The gateway: the record of each live request, text in and text out, and nothing of scheduling.

``core/`` decides (records, attach, the exactly-once filter, reports); ``service.py`` and its
neighbours translate between gRPC and the core; ``actor.py`` is the Ray process around them. No
code here may know a worker's, a store's or the controller's insides: it meets them in messages.
"""
