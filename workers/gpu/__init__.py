"""The CUDA runner: weights, static buffers, graphs and memory of one card.

``GpuRunner`` is to the engine what ``model.runner.ModelRunner`` is on the CPU. It may import
``kernels``, ``workers.model`` and ``workers.pool``, never the engine or ``workers.core``. Nothing
here is imported where there is no card but by the launcher's check (``card``), which needs none.
"""
