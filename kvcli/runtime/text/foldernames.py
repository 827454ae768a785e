"""Names of the files that a model's folder has beside its weights."""

CONFIG, TOKENIZER, SENTENCEPIECE, SETTINGS = "config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"
FILES = (
    *(TOKENIZER, SENTENCEPIECE, SETTINGS, "generation_config.json", CONFIG),
    *("chat_template.jinja", "chat_template.json", "added_tokens.json"),
)
"""What kv reads, where it is there."""
