"""Between text and token ids: tokenizers, chat templates, conversations, stop strings."""
