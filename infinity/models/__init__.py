"""A model, its tokenizer, and the data to train on or to continue.

| module | answers |
|---|---|
| `source` | which model a name means, and how it is built |
| `description` | whether its config.json describes a model |
| `tokenizer`, `data` | which tokens a text becomes, and how they are packed into windows |
| `generation` | how a model continues prompts, and the size of their KV cache |
| `quantization` | how a checkpoint becomes one in 4 bits |
| `shards` | how a stream of tensors becomes safetensors files |
| `schedule` | the learning rate of a step |
| `reading` | how files that a user names are opened |

Nothing here prints. `transformers` is imported only when a model is used.
"""
