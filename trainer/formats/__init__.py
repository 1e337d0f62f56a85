"""How rows of language models become text: a description of each data format, which the config and the data ask."""
