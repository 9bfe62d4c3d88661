"""Which model is trained: `source` finds it, `description` checks its config.json, `tokenizer` turns text into ids.

`reading` opens the files that a user names. Nothing here prints, and `transformers` is imported only when a model is asked for.
"""
