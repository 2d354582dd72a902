"""The controller's process: who runs where.

``core/`` decides and is pure; the modules here translate gRPC and Ray to its events and perform its
effects. Nothing here may import another process's code, see tokens or see KV bytes.
"""
