"""The decoder: configuration, checkpoint loaders, and the forward pass over a paged pool.

Text (tokenizer, chat template) lives in ``text``; scheduling in ``workers.core``. Nothing here
knows a request, only rows of tokens with their block tables.
"""
