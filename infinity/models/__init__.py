"""What is trained or asked, and on what: a model, its tokenizer, and windows of tokens.

| module | answers |
|---|---|
| `source` | which model a name means, and how it is built |
| `description` | whether its config.json describes a model |
| `tokenizer`, `data` | which tokens a text becomes, and how they are packed into windows |
| `generation` | which texts a model makes of prompts, and what their KV cache takes |
| `schedule` | the learning rate of a step |
| `reading` | how files that a user names are opened |

Nothing here prints, and `transformers` is imported only when a model is asked for.
"""
