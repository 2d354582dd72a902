"""Text in, text out: tokenizers, chat templates, incremental detokenizing and stop strings.

Lives here: what turns text into token ids and back, as plain synchronous objects. Gateways import
it on machines that have no torch, so neither torch nor anything else of ours may be imported.

* :func:`deepinfer.text.load.load_tokenizer` opens a Hugging Face folder or a GGUF file.
* :class:`deepinfer.text.tokenizer.Tokenizer` encodes, decodes and knows the special ids.
* :class:`deepinfer.text.chat.ChatTemplate` renders messages to a prompt, sandboxed.
* :class:`deepinfer.text.stream.TextStream` turns one sequence's tokens into safe text, as a
  function of the tokens alone, so a resumed stream continues exactly.
"""
